"""Trainers of others through ROSE, on this machine: a fleet for them, a tiny policy, measurements."""

"""Trainers of others through ROSE, on this machine: a fleet, a tiny policy, measurements."""

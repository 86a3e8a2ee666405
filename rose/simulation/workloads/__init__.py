"""Workloads: users' traffic, and episodes of training jobs; seeded and read lazily."""

"""Deltas as files: make one of two checkpoints, and apply it to one."""

"""Grants of compute: whether a guest may run a step, and for how long."""

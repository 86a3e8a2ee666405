"""Grants of compute: who decides that a guest may run a step, and for how long."""

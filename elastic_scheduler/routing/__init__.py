"""Routing: which replica takes a turn, and why."""

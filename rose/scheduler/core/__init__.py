"""Decisions of a scheduler, as a core without input or output."""

"""Weights of a replica: update without a restart, version of every token."""

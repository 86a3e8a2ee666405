"""Grants: when a guest may run, from what its host publishes."""

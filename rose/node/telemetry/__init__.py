"""Measurements of a node, shown on `/metrics`."""

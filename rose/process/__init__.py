"""Processes: starting, pinning, watching and ending them."""

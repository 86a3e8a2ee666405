"""Weights inside an engine: map of its parameters, updates while it runs, and their proofs."""

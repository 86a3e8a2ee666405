"""Weights inside vLLM: map of its parameters, updates of a running engine, and their proofs."""

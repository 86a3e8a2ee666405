"""Weights inside an engine: a version is decoded, staged, written while it runs, and proved."""

"""Benchmarks on real engines; each writes raw records from which its figures are recomputed."""

"""Weights inside vLLM: unpacked Linear layers, loader map, scatter, probe, worker extension."""

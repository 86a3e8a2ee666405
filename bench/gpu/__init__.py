"""Measurements of one NVIDIA GPU, in pieces of under ten minutes: `python -m bench.gpu`."""

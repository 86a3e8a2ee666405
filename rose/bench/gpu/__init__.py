"""What one NVIDIA GPU shows, in pieces of under ten minutes: `python -m rose.bench.gpu`."""

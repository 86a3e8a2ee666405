"""What one NVIDIA GPU shows, in pieces of under ten minutes: `python -m bench.gpu`."""

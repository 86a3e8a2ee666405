"""Kill trials: `python -m rose.bench.kill` (or `make bench-kill`)."""

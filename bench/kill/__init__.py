"""Kill trials: `python -m bench.kill` (or `make bench-kill`)."""

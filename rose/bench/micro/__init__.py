"""Benchmarks of one thing each, a module each: `python -m rose.bench.micro.routing`."""

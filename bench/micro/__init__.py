"""Benchmarks of one thing each, a module each: `python -m bench.micro.routing`."""

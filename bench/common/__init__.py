"""Processes, load, checks, statistics, reports and models of all benchmarks and of the demo."""

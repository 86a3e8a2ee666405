"""What the benchmarks and the demo share: checks, intervals, records, tables, models, engines."""

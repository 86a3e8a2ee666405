"""The demo's report: records of a run, measures, claims, plots."""

"""Time that tests wait for events that are bound to come."""

# Far above what anything takes, on a machine that is busy with others too; below a test's timeout.
PATIENCE_S = 30.0

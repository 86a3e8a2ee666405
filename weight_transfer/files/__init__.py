"""Delta files: compare two checkpoints into one, and apply one to a checkpoint."""

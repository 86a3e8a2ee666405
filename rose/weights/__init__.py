"""`rose weights`: what changed between two checkpoints on disk, as a file of its own."""

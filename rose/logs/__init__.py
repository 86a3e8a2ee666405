"""Event logs: JSON lines, rotated, written by a thread of their own."""

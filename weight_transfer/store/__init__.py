"""Store of chunks and versions on disk, and its catalog."""

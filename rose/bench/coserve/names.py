"""What the engines of a run are called."""

HOST, GUEST, NAIVE = "host", "guest", "naive"

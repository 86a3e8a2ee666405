"""Guest engines of a node: start, supervise, place, kill."""

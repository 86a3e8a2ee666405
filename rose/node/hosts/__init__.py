"""The hosts of a node: found, watched, told of."""

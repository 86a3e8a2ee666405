"""Commands about this machine: a node, a store, keys, weights."""

"""Verbs about what lies on this machine: a node, a store, keys, weights."""

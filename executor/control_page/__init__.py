"""Control page: the shared memory in which host, node and guest publish state."""

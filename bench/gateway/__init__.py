"""Cost of a router between trainer and engine, per turn and per token: `make bench-gateway`."""

"""`make bench-gateway`: what a router between trainer and engine costs, per turn and per token."""

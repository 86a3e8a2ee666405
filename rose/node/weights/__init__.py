"""Weights of a node: which version its replicas need, and bringing it to them."""

"""Weights of a node: fetches the versions that its replicas need, and applies them."""

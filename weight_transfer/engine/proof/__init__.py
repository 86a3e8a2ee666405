"""Proof that the weights an engine computes with are the version it claims."""

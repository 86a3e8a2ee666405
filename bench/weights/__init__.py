"""Costs of weight transfer: bytes for each changed weight and seconds, beside another scheme."""

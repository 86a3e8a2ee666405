"""Turns of the gateway: request, attempts, hedging, tokens."""

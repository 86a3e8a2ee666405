"""Turns: journal, idempotency and hedging."""

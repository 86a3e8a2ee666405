"""Sharing of GPU pages between processes over a Unix socket."""

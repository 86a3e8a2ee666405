"""Fetching of versions: from which peer, within which limits."""

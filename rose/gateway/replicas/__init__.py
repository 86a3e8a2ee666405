"""Replicas as the gateway sees them: table, watch, dispatch of turns."""

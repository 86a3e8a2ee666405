"""KV memory: backing, caps, lending, shrinking and reclaim."""

"""Publishing: encode a new version's shards and join them into a manifest."""

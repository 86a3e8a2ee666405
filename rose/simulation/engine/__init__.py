"""Models of engines on cards: batching, KV memory, host and guest of one card."""

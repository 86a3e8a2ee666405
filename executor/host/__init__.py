"""Host side of every engine: what it publishes, and how it lends KV memory."""

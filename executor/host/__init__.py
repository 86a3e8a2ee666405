"""Host side of every engine: publishes its state, and lends its KV memory."""

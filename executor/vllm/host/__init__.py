"""Host side of vLLM: publishes its state and lends KV memory."""

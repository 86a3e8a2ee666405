"""Host side of SGLang: publishes its state and lends KV memory."""

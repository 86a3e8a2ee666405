"""KV cache memory of a vLLM engine that can grow and shrink."""

"""vLLM's part of a weight update: its workers, its models, its packed weights."""

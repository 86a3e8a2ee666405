"""What of a weight update is vLLM's own: its workers, its models, its packed weights."""

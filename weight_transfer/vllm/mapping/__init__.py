"""Map from a checkpoint's tensors to slices of vLLM's parameters."""

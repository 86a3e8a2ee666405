"""What of a weight update is SGLang's own: its models, and how the probe runs through them."""

"""SGLang's part of a weight update: its models, and the probe that runs through them."""

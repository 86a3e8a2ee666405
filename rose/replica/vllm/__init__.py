"""A replica inside vLLM."""

"""A replica inside SGLang."""

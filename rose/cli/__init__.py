"""The `rose` command."""

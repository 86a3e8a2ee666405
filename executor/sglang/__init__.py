"""Plugins for stock SGLang. Each module is loaded by name, only where it is needed."""

__all__: list[str] = []

"""The `rose` command."""

from rose.cli.parser import Parser

__all__ = ["Parser"]

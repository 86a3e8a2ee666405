"""The `rose` command."""

from rose.cli.main import Parser

__all__ = ["Parser"]

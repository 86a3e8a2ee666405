"""The `rose` command."""

from rose.command_line.parser import Parser

__all__ = ["Parser"]

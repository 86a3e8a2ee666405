"""The demo: one command that runs the whole loop on one machine and reports what it proves."""

from bench.demo.cli import DemoSettings

__all__ = ["DemoSettings"]

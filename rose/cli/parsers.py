"""Parsers of all commands as one tree, for completion, the reference and tests.

Each process makes its parser in its `main`: here that call ends before anything is parsed or run.
"""

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from rose.cli.main import PROCESSES, make_parser


class _Built(BaseException):
    """A parser is complete, and would be used next."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser of `rose`, with the options of its processes that are installed."""
    parser = make_parser()
    commands = commands_of(parser)
    for name, (module, _) in PROCESSES.items():
        try:
            commands[name] = parser_of(importlib.import_module(module).main)
        except ModuleNotFoundError:  # of an extra that this environment lacks, or the demo
            continue
    return parser


def parser_of(main: Callable[[Sequence[str]], int]) -> argparse.ArgumentParser:
    """Return the parser that a process's `main` makes."""
    with _only_built():
        try:
            main([])
        except _Built as built:
            return built.parser
    raise AssertionError(f"{main} has no parser")


@contextmanager
def _only_built() -> Iterator[None]:
    def parse_args(self: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        raise _Built(self)

    kept = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = kept  # type: ignore[method-assign]


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a parser by their names; a change of it changes the parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def every_command(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command by its words, `policy get`, with its parser, in the order of the help."""
    for name, child in commands_of(parser).items():
        words = (*path, name)
        yield " ".join(words), child
        yield from every_command(child, words)

"""`rose sim COMMAND`: each command's module has `add_arguments(parser)` and `run(args)`."""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rose.command_line.parser import Parser

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "run": ("run", "run one scenario under one policy"),
        "compare": ("compare", "run one scenario under several policies"),
        "sweep": ("sweep", "run one scenario with other constants, several runs at once"),
        "what-if": ("what_if", "say what lending would gain and cost, by a trace of your users"),
        "fleet": ("fleet", "run a fleet of 1,000 cards for days, by means instead of steps"),
        "paper": ("paper", "run the ROSE paper's set-ups, and show its rows beside ours"),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Raises RoseError with one line."""
    parser = Parser(prog="rose sim", description="Simulate a cluster with ROSE's own decisions.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        _module(module).add_arguments(command)
        command.set_defaults(module=module)
    args: argparse.Namespace = parser.parse_args(argv)
    return int(_module(args.module).run(args))


def _module(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 -- a module
    return importlib.import_module(f"rose.simulation.commands.{name}")

"""`rose sim COMMAND`: each command's module has `add_arguments(parser)` and `run(args)`."""

import importlib
from collections.abc import Mapping
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


def parser(prog: str) -> Parser:
    """Return the parser of `rose sim` and its commands."""
    made = Parser(prog, description="Simulate a cluster with ROSE's own decisions.")
    commands = made.add_commands()
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        found = importlib.import_module(f"rose.simulation.commands.{module}")
        found.add_arguments(command)
        command.set_defaults(run=found.run)
    return made

"""`rose completion bash|zsh|fish`: a script that completes commands, options, choices and files.

shtab writes it from the parsers: the tab key starts no process of ROSE.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from rose.cli.exit_codes import ExitCode
from rose.command_line.parser import Parser

SHELLS: Final = ("bash", "zsh", "fish")


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose completion`."""
    made = Parser(prog)
    made.add_argument("shell", choices=SHELLS)
    made.set_defaults(run=_complete)
    return made


def _complete(args: argparse.Namespace) -> int:
    from rose.cli.main import whole_parser

    sys.stdout.write(script(whole_parser(), args.shell))
    return ExitCode.DONE


def script(whole: argparse.ArgumentParser, shell: str) -> str:
    """Return the text of the script by which a shell completes all commands of a parser.

    shell: bash, zsh or fish.
    """
    # Imported here: only this command needs it.
    import shtab

    from rose.cli.main import every_command

    for command in (whole, *(child for _, child in every_command(whole))):
        for action in command._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it
    return str(shtab.complete(whole, shell=shell))

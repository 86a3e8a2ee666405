"""`rose completion bash|zsh|fish`: a script that completes commands, options, choices and files.

shtab writes it from the parsers: the tab key starts no process of ROSE.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from rose.cli.exit_codes import ExitCode
from rose.cli.options import Subparsers

SHELLS: Final = ("bash", "zsh", "fish")


def add_completion_command(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("completion", help="print a script that completes `rose`")
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=_complete)


def _complete(args: argparse.Namespace) -> int:
    sys.stdout.write(script(args.shell))
    return ExitCode.DONE


def script(shell: str) -> str:
    """Return the script for a shell, with all commands that are installed here."""
    # Imported here: only this command needs it.
    import shtab

    from rose.cli.parsers import every_command, whole_parser

    parser = whole_parser()
    for _, command in (("", parser), *every_command(parser)):
        for action in command._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it
    return str(shtab.complete(parser, shell=shell))

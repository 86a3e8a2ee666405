"""Write docs/operators/cli.md: every command with its options, examples and exit codes.

    parsers of all commands ──► whole_parser ──► parts of the page
                                            └──► examples: each is one that its parser takes

Nothing is read from source. A command without an example, or in no group, ends the script.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rose.addresses import DefaultPort
from rose.cli.exit_codes import ExitCode
from rose.cli.main import every_command, whole_parser
from rose.cli.options import add_scheduler_options
from rose.command_line.examples import EXAMPLES, SERVES
from rose.command_line.output import add_output_options
from scripts.generated import ROOT, main, with_parts

PAGE: Final = ROOT / "docs" / "operators" / "cli.md"
GROUPS: Final = {
    "Looking": (
        *("advise", "status", "nodes", "replicas", "top", "jobs", "explain", "usage", "compare"),
        "audit",
    ),
    "Policies": ("policy",),
    "Stopping": ("hold", "drain", "stop-all", "resume", "harvest", "revoke", "kill", "unkill"),
    "Setting up": (
        *("init", "certs", "token", "store", "completion", "doctor", "support-bundle"),
        *("plugin", "profile"),
    ),
    "Simulating": ("sim",),
    "Weights": ("weights", "publish", "relay"),
    "Processes": ("scheduler", "gateway", "node", "front", "demo"),
}


class UndescribedError(Exception):
    """A command has no example, no group, or an example that its parser refuses."""


def page() -> dict[Path, str]:
    """Return the page as it has to be."""
    parser = whole_parser()
    commands = dict(every_command(parser))
    _check(parser, commands)
    parts = []
    for title, names in GROUPS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            for path in (p for p in commands if p == name or p.startswith(f"{name} ")):
                parts.append(_command(path, commands[path]))
    parts_of = {"exit codes": _codes(), "ports": _ports(), "commands": "".join(parts)}
    return with_parts(PAGE, parts_of)


def _check(parser: argparse.ArgumentParser, commands: Iterable[str]) -> None:
    grouped = {name for names in GROUPS.values() for name in names}
    for path in commands:
        if path.split()[0] not in grouped:
            raise UndescribedError(f"`rose {path}` is in no group of scripts/cli_reference.py")
        if path not in EXAMPLES:
            raise UndescribedError(f"`rose {path}` has no example in rose/command_line/examples.py")
    for path in (p for p in EXAMPLES if p.split()[0] in SERVES):
        for line in EXAMPLES[path]:
            parser.parse_args(shlex.split(line)[1:])


def _codes() -> str:
    rows = "".join(f"| {int(code)} | {code.meaning} |\n" for code in ExitCode)
    return f"| code | means |\n| --- | --- |\n{rows}"


def _ports() -> str:
    rows = "".join(f"| {port} | {port.listener} |\n" for port in DefaultPort)
    return f"| port | listens |\n| --- | --- |\n{rows}"


def _command(path: str, parser: argparse.ArgumentParser) -> str:
    subcommands = any(isinstance(a, argparse._SubParsersAction) for a in parser._actions)
    level = "###" if " " not in path else "####"
    lines = [f"\n{level} rose {path}\n\n"]
    if what := _what(path, parser):
        lines.append(f"{what}\n\n")
    if subcommands:
        return "".join(lines)
    shown = [action for action in parser._actions if _is_shown(action)]
    lines.append(f"```\nrose {path}{_usage(shown)}\n```\n")
    rows = [_row(action) for action in shown if not _is_common(action, parser)]
    if rows:
        lines.append("\n| argument | |\n| --- | --- |\n" + "".join(rows))
    lines.append("\n```bash\n" + "".join(f"{each}\n" for each in EXAMPLES[path]) + "```\n")
    return "".join(lines)


_WHATS: dict[str, str] = {}


def _what(path: str, parser: argparse.ArgumentParser) -> str:
    """Return the help that the parent command has of it, as a sentence."""
    if not _WHATS:
        _WHATS.update(_helps(whole_parser()))
    text = _WHATS.get(path) or (parser.description or "").partition("\n")[0]
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""


def _helps(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield f"{path}{choice.dest}", choice.help or ""
            for name, child in action.choices.items():
                yield from _helps(child, f"{path}{name} ")


def _is_shown(action: argparse.Action) -> bool:
    return not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS


def _common() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_scheduler_options(parser)
    add_output_options(parser, watch=True)
    return {action.dest: action for action in parser._actions}


COMMON: Final = _common()


def _is_common(action: argparse.Action, parser: argparse.ArgumentParser) -> bool:
    """Return True for an option that the head of the page describes."""
    common = COMMON.get(action.dest)
    return common is not None and common.help == action.help


def _usage(actions: Sequence[argparse.Action]) -> str:
    places = [_value(action) for action in actions if not action.option_strings]
    needed = [
        f"{_name(a)} {_value(a)}".rstrip() for a in actions if a.option_strings and a.required
    ]
    optional = any(a.option_strings and not a.required for a in actions)
    return "".join(f" {each}" for each in (*places, *needed)) + (" [options]" if optional else "")


def _name(action: argparse.Action) -> str:
    return ", ".join(action.option_strings)


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    value = "|".join(map(str, action.choices)) if action.choices else action.metavar or action.dest
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    if not action.option_strings and not action.metavar and not action.choices:
        text = text.upper()
    match action.nargs:
        case "?":
            return f"[{text}]"
        case "*":
            return f"[{text} …]"
        case "+":
            return f"{text} …"
    return text


def _row(action: argparse.Action) -> str:
    shown = f"{_name(action)} {_value(action)}".strip().replace("|", "\\|")
    what = argparse.HelpFormatter("rose")._expand_help(action) if action.help else ""
    what = what.replace("|", "\\|")
    if action.required and action.option_strings:
        what = f"{what}; needed" if what else "needed"
    return f"| `{shown}` | {what} |\n"


if __name__ == "__main__":
    sys.exit(main(page, "scripts/cli-reference"))

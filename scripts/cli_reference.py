"""Write docs/operators/cli.md: every command with its options, examples and exit codes.

    parsers of all commands ──► whole_parser ──► page
                                            └──► examples: each is one that its parser takes

Nothing is read from source. A command without an example, or in no group, ends the script.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rose.cli.exit_codes import ExitCode
from rose.cli.main import every_command, whole_parser
from rose.cli.options import add_scheduler_options
from rose.command_line.examples import EXAMPLES, SERVES
from rose.command_line.output import add_output_options

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "operators" / "cli.md"
GROUPS: Final = {
    "Looking": (
        "status",
        "nodes",
        "replicas",
        "top",
        "jobs",
        "explain",
        "usage",
        "compare",
        "audit",
    ),
    "Policies": ("policy",),
    "Stopping": ("hold", "drain", "stop-all", "resume", "harvest", "revoke", "kill", "unkill"),
    "Setting up": ("certs", "token", "store", "completion", "doctor", "support-bundle", "profile"),
    "Simulating": ("sim",),
    "Weights": ("weights", "publish", "relay"),
    "Processes": ("scheduler", "gateway", "node", "front", "demo"),
}
HEAD: Final = """\
# Commands

Every command of `rose`, with its options and examples.
`scripts/cli-reference` writes this page from the parsers;
`make check` fails where it is not current.
Each example is run by a test; those of processes that serve are read by their parsers.

## What all of them have in common

- `rose COMMAND --help` says what stands here.
- **Which scheduler**: `--scheduler HOST:PORT`, several with commas.
  One that stands by names the one that leads.
  `--ca`, `--certificate` and `--key` where it asks for [certificates](../security.md).
- **How it is written**: `-o table`, `json` or `yaml`.
  All verbs show one read model (`rose/operate/fleet.py`): its fields are those of JSON and YAML,
  with units in their names. A figure that nobody said is `null`, never 0.
  Fields are added, and keep their meaning.
- **Again and again**: `--watch [SECONDS]`.
  A terminal shows the newest alone; a pipe gets one after the other, of JSON one a line.
  A scheduler that does not answer for a while is said, and asked again.
- **On a terminal** tables have colours (`NO_COLOR=1` turns them off) and are cut to its width:
  the widest columns first; then some are left out, and it is said which.
  In a pipe nothing is cut.
- **Before something changes**: `--dry-run` says what would, and changes nothing.
  What changes several things checks all of them first: nothing is half-applied.
- **What is wrong** is one line on standard error, with what to do next.

## Exit codes

"""


class UndescribedError(Exception):
    """A command has no example, no group, or an example that its parser refuses."""


def page() -> str:
    """The whole page."""
    parser = whole_parser()
    commands = dict(every_command(parser))
    _check(parser, commands)
    parts = [HEAD, _codes()]
    for title, names in GROUPS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            for path in (p for p in commands if p == name or p.startswith(f"{name} ")):
                parts.append(_command(path, commands[path]))
    return "".join(parts)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; with --check say whether it is current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when it is stale")
    args = parser.parse_args(argv)
    made = page()
    if not args.check:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
        sys.stderr.write("docs/operators/cli.md is stale: run scripts/cli-reference\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`rose audit verify|tail`: check that an audit log is whole, and print it.

Exit code 0 for a whole chain, 1 for one with a fault, 2 for a file that is not an audit log.
"""

import argparse
import json
import re
from collections import deque
from pathlib import Path

from rose.clock import utc_text
from rose.command_line.output import Format, View, add_output_options, say, write
from rose.command_line.parser import Parser
from rose.security.audit_log import Record, opened, read, verify

_KNOWN = re.compile(r"(\d{1,18}):([0-9a-f]{64})")


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose audit verify` and `rose audit tail`."""
    made = Parser(prog, description="Check and read the audit log of a process.")
    commands = made.add_commands()
    check = commands.add_parser("verify", help="follow the chain of hashes from end to end")
    check.add_argument(
        "--head", type=_known, metavar="N:HASH", help="a record that you noted elsewhere"
    )
    check.set_defaults(run=_verify)
    tail = commands.add_parser("tail", help="print the newest records")
    tail.add_argument("-n", type=int, default=20, metavar="COUNT", help="default 20")
    add_output_options(tail)
    tail.set_defaults(run=_tail)
    for command in (check, tail):
        command.add_argument("file", type=Path, metavar="FILE", help="LOG_DIR/audit-NAME.jsonl")
    return made


def _known(text: str) -> tuple[int, str]:
    match = _KNOWN.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text[:90]!r} is no N:HASH, as `rose audit verify` says")
    return int(match[1]), match[2]


def _verify(args: argparse.Namespace) -> int:
    found = verify(args.file, args.head)
    if found.wrong:
        say(f"NOT WHOLE after {found.records} good records: {found.wrong}")
        return 1
    lost = f"; {found.lost} could not be written, and it says so" if found.lost else ""
    say(
        f"{args.file}: records {found.head.first} to {found.head.n} are whole{lost}; head"
        f" {found.head.n}:{found.head.hash}"
    )
    return 0


def _tail(args: argparse.Namespace) -> int:
    records: list[Record] = []
    lines: list[str] = []
    for place, line in deque(read(args.file), maxlen=max(0, args.n)):
        try:
            records.append(opened(line))
            lines.append(_line_of(records[-1]))
        except ValueError as error:
            lines.append(f"{place}: {error}")
    write(View(records, tuple(lines)), Format(args.output))
    return 0


def _line_of(record: Record) -> str:
    by = f" by {record.by}" if record.by else ""
    fields = json.dumps(record.fields, separators=(", ", ": "))
    when = utc_text(record.t)
    return f"{when} {record.n} {record.source} {record.event}{by} {fields}"

"""`rose usage FILE`: lent capacity by job, from the schedulers' usage records.

Exit code 0, also if nothing was lent; 2 for a file that cannot be read.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rose.clock import utc_text
from rose.command_line.output import Format, Table, View, add_output_options, note, write
from rose.command_line.parser import Parser, duration_s
from rose.errors import ConfigError
from rose.scheduler.core.usage import Lent

DAY_S = 86_400.0
COLUMNS = ("owner", "job")
FIGURES = ("LEASED H", "GPU H", "GIB H", "TOKENS")
GIB_H = (1 << 30) * 3_600.0


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose usage`."""
    made = Parser(prog, description="Say what hosts lent, by owner and job.")
    made.add_argument(
        "--since", type=duration_s, default=DAY_S, metavar="TIME", help="1h, 7d; default 1d"
    )
    made.add_argument(
        "--by", choices=(*COLUMNS, "both"), default="both", help="one sum a line (default both)"
    )
    add_output_options(made)
    made.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="LOG_DIR/usage.jsonl of each scheduler"
    )
    made.set_defaults(run=_run)
    return made


def _run(args: argparse.Namespace) -> int:
    columns = COLUMNS if args.by == "both" else (args.by,)
    since_s = time.time() - args.since
    sums = _summed(args.files, since_s, columns)
    write(_view(columns, sums, since_s), Format(args.output))
    return 0


Sums = dict[tuple[str, ...], Lent]


def _summed(files: Sequence[Path], since_s: float, columns: Sequence[str]) -> Sums:
    sums: Sums = {}
    for file in files:
        for key, lent in _records(file, since_s, columns):
            sums[key] = sums.get(key, Lent()).plus(lent)
    return dict(sorted(sums.items()))


def _records(
    file: Path, since_s: float, columns: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], Lent]]:
    # A rotated log continues in FILE.1 and so on; the order does not matter.
    parts = [file, *file.parent.glob(f"{file.name}.[0-9]*")]
    if not file.is_file():
        raise ConfigError(f"{file} is no file; give LOG_DIR/usage.jsonl of a scheduler that led")
    for part in parts:
        with part.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    said = json.loads(line)
                    if lost := said.get("records_dropped"):
                        note(f"{part} lacks {lost} records: sums are too low")
                        continue
                    if said["t"] < since_s:
                        continue
                    lent = Lent(said["seconds"], said["compute_s"], said["byte_s"], said["tokens"])
                    yield tuple(str(said[column]) for column in columns), lent
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    if not line.endswith("\n"):
                        continue  # the last one, which is being written
                    raise ConfigError(f"{part}, line {number}, is no record of usage") from error


def _view(columns: Sequence[str], sums: Sums, since_s: float) -> View:
    data = [
        dict(zip(columns, key, strict=True))
        | {
            "leased_s": round(lent.seconds, 3),
            "gpu_s": round(lent.compute_s, 3),
            "byte_s": round(lent.byte_s),
            "tokens": lent.tokens,
        }
        for key, lent in sums.items()
    ]
    rows = tuple(
        (
            *(part or "-" for part in key),
            f"{lent.seconds / 3600:.2f}",
            f"{lent.compute_s / 3600:.2f}",
            f"{lent.byte_s / GIB_H:.2f}",
            str(lent.tokens),
        )
        for key, lent in sums.items()
    )
    titles = (*(column.upper() for column in columns), *FIGURES)
    what = "lent" if sums else "nothing was lent"
    return View(
        data,
        (f"{what} since {utc_text(since_s)}",),
        (Table(titles, rows, right=frozenset(FIGURES)),),
    )

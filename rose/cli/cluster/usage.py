"""`rose usage FILE`: lent capacity by owner, job and day, from the schedulers' usage records.

Exit code 0, also if nothing was lent; 2 for a file that cannot be read.
"""

import argparse
import csv
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from rose.clock import utc_text
from rose.command_line.output import Format, Table, View, add_output_options, note, write
from rose.command_line.parser import Parser, duration_s
from rose.errors import ConfigError
from rose.scheduler.core.usage import Lent

DAY_S = 86_400.0
OWNER, JOB, DAY = "owner", "job", "day"
COLUMNS = (OWNER, JOB, DAY)
FIGURES = ("LEASED H", "GPU H", "GIB H", "TOKENS", "COST")
HOUR_S = 3_600.0
GIB_H = (1 << 30) * HOUR_S
CSV, OPENCOST = "csv", "opencost"


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose usage`."""
    made = Parser(prog, description="Say what hosts lent, by owner, job and day.")
    made.add_argument(
        "--since", type=duration_s, default=DAY_S, metavar="TIME", help="1h, 7d; default 1d"
    )
    made.add_argument(
        "--by",
        type=_columns,
        default=(OWNER, JOB),
        metavar="COLUMNS",
        help="one sum a line: some of owner, job and day (UTC), with commas; default owner,job",
    )
    made.add_argument(
        "--gpu-hour", type=float, metavar="PRICE", help="what an hour of one GPU costs its owner"
    )
    add_output_options(made, more=(CSV, OPENCOST))
    made.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="LOG_DIR/usage.jsonl of each scheduler"
    )
    made.set_defaults(run=_run)
    return made


def _columns(text: str) -> tuple[str, ...]:
    given = tuple(text.split(","))
    if len(set(given)) < len(given) or not set(given) <= set(COLUMNS):
        raise argparse.ArgumentTypeError(f"{text}: write some of {', '.join(COLUMNS)}, each once")
    return given


def _run(args: argparse.Namespace) -> int:
    since_s = time.time() - args.since
    # An allocation is one owner's for one job, within a day.
    columns = (DAY, OWNER, JOB) if args.output == OPENCOST else args.by
    rows = _rows(columns, _summed(args.files, since_s, columns), args.gpu_hour)
    if args.output == CSV:
        sys.stdout.write(_csv(columns, rows))
    elif args.output == OPENCOST:
        sys.stdout.write(json.dumps(_allocations(rows), indent=2) + "\n")
    else:
        write(_view(columns, rows, since_s), Format(args.output))
    return 0


Sums = dict[tuple[str, ...], Lent]
Row = Mapping[str, Any]


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
                    said[DAY] = utc_text(said["t"])[:10]
                    yield tuple(str(said[column]) for column in columns), lent
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    if not line.endswith("\n"):
                        continue  # the last one, which is being written
                    raise ConfigError(f"{part}, line {number}, is no record of usage") from error


def _rows(columns: Sequence[str], sums: Sums, price: float | None) -> list[Row]:
    """Return each sum by name, with `cost` if a GPU hour has a price."""
    rows: list[Row] = []
    for key, lent in sums.items():
        row: dict[str, Any] = dict(zip(columns, key, strict=True)) | {
            "leased_s": round(lent.seconds, 3),
            "gpu_s": round(lent.compute_s, 3),
            "byte_s": round(lent.byte_s),
            "tokens": lent.tokens,
        }
        if price is not None:
            row["cost"] = round(price * lent.compute_s / HOUR_S, 6)
        rows.append(row)
    return rows


def _csv(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return the rows as CSV with a head (RFC 4180), in hours and GiB hours."""
    cost = [] if not rows or "cost" not in rows[0] else ["cost"]
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow([*columns, "leased_hours", "gpu_hours", "gib_hours", "tokens", *cost])
    for row in rows:
        hours = [f"{row[name] / unit:.6f}" for name, unit in _HOURS]
        table.writerow([*(row[c] for c in columns), *hours, row["tokens"], *(row[c] for c in cost)])
    return text.getvalue()


_HOURS = (("leased_s", HOUR_S), ("gpu_s", HOUR_S), ("byte_s", GIB_H))


def _allocations(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the rows as OpenCost's allocation API answers: one set of allocations a day."""
    days: dict[str, dict[str, object]] = {}
    for row in rows:
        begin = datetime.combine(date.fromisoformat(row[DAY]), datetime.min.time(), UTC)
        window = {
            "start": f"{begin:%Y-%m-%dT%H:%M:%SZ}",
            "end": f"{begin + timedelta(days=1):%Y-%m-%dT%H:%M:%SZ}",
        }
        name = f"{row[OWNER]}/{row[JOB]}"
        cost = row.get("cost", 0.0)
        days.setdefault(row[DAY], {})[name] = {
            "name": name,
            "properties": {"labels": {"rose_owner": row[OWNER], "rose_job": row[JOB]}},
            "window": window,
            **window,
            "minutes": round(row["leased_s"] / 60, 3),
            "gpuHours": round(row["gpu_s"] / HOUR_S, 6),
            "gpuCost": cost,
            "totalCost": cost,
        }
    return {"code": 200, "data": list(days.values())}


def _view(columns: Sequence[str], rows: Sequence[Row], since_s: float) -> View:
    priced = any("cost" in row for row in rows)
    figures = FIGURES if priced else FIGURES[:-1]
    cells = tuple(
        (
            *(row[column] or "-" for column in columns),
            *(f"{row[name] / unit:.2f}" for name, unit in _HOURS),
            str(row["tokens"]),
            *([f"{row['cost']:.2f}"] if priced else []),
        )
        for row in rows
    )
    what = "lent" if rows else "nothing was lent"
    return View(
        list(rows),
        (f"{what} since {utc_text(since_s)}",),
        (Table((*(c.upper() for c in columns), *figures), cells, right=frozenset(figures)),),
    )

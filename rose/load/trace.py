"""Request traces in the Azure format: `TIMESTAMP,ContextTokens,GeneratedTokens`."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rose.errors import RoseError

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MAX_REQUESTS = 2_000_000


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace; `offset_s` counts from the trace's first request."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int


def _timestamp_s(text: str) -> float:
    """Seconds of `2023-11-16 18:17:03.9799600`; without a zone it is UTC, which never jumps."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text!r}; write it as 2023-11-16 18:17:03.97") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(text: str, column: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{column} is {text!r}; give a whole number of tokens")
    return int(text)


def _parse_row(row: list[str]) -> tuple[float, int, int]:
    if len(row) != len(COLUMNS):
        raise ValueError(f"{len(row)} columns, expected {len(COLUMNS)}")
    return _timestamp_s(row[0]), _tokens(row[1], COLUMNS[1]), _tokens(row[2], COLUMNS[2])


def _rows(lines: Iterable[str], name: str) -> Iterator[tuple[float, int, int]]:
    reader = csv.reader(lines)
    header = next(reader, None)
    if header is None or [cell.strip() for cell in header] != COLUMNS:
        raise RoseError(f"{name}:1: the first line must be {','.join(COLUMNS)}")
    latest_s = float("-inf")
    try:
        for row in reader:
            parsed = _parse_row(row)
            if parsed[0] < latest_s:
                raise ValueError("its time is before the line above")  # noqa: TRY301 - one place names the line
            if reader.line_num > MAX_REQUESTS:
                raise ValueError(f"more than {MAX_REQUESTS} requests; cut the file")  # noqa: TRY301 - as above
            latest_s = parsed[0]
            yield parsed
    except (ValueError, csv.Error) as error:
        raise RoseError(f"{name}:{reader.line_num}: {error}") from error


def read_trace(path: Path) -> tuple[TracedRequest, ...]:
    """All requests of the trace in order of time.

    Raises `RoseError` naming file and line when the file is not such a trace.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(_rows(file, str(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise RoseError(f"{path}: cannot be read as a trace: {error}") from error
    if len(rows) < 2 or rows[-1][0] == rows[0][0]:
        raise RoseError(f"{path}: a trace needs two requests at different times")
    start_s = rows[0][0]
    return tuple(TracedRequest(time_s - start_s, prompt, output) for time_s, prompt, output in rows)

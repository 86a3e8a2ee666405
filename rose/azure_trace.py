"""Reader of request traces in the Azure LLM format: `TIMESTAMP,ContextTokens,GeneratedTokens`.

It reads line by line, so that a week of a cluster's requests never has to fit in memory. An invalid
trace is refused in one line with the file, the line and the key.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from rose.errors import RoseError

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MAX_REQUESTS = 2_000_000
MAX_TOKENS = 100_000_000
"""Most tokens of a prompt or an answer: ten times the longest context of any model."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace: its tokens, and the seconds since the trace's first request."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int


def stream_trace(
    path: Path, max_gap_s: float = inf, max_requests: float = inf, least_tokens: int = 0
) -> Iterator[TracedRequest]:
    """Yield the trace's requests in order of time; the file is read line by line.

    Raises `RoseError` that names file, line and column, for lines out of order, a gap of more than
    `max_gap_s` seconds, fewer tokens than `least_tokens`, more requests than `max_requests`, or no
    request.
    """
    start_s: float | None = None
    latest_s, name, count = -inf, str(path), 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, time_s, prompt, output in _rows(file, name):
                _check_time(f"{name}:{line}", time_s, latest_s, max_gap_s)
                count += 1
                if count > max_requests:
                    raise RoseError(f"{name}:{line}: more than {max_requests} requests; cut it")
                for key, tokens in zip(COLUMNS[1:], (prompt, output), strict=True):
                    if tokens < least_tokens:
                        raise RoseError(
                            f"{name}:{line}: {key} is {tokens}; drop requests that failed, all"
                            f" others have at least {least_tokens}"
                        )
                start_s = time_s if start_s is None else start_s
                latest_s = time_s
                yield TracedRequest(time_s - start_s, prompt, output)
    except (OSError, UnicodeDecodeError) as error:
        raise RoseError(f"{path}: cannot be read as a trace: {error}") from error
    if start_s is None:
        raise RoseError(f"{name}:2: {COLUMNS[0]}: no request; give a trace that has some")


def read_trace(path: Path) -> tuple[TracedRequest, ...]:
    """Return all requests of a trace in order of time, at most MAX_REQUESTS.

    Raises `RoseError` that names file and line, for an invalid trace or one of fewer than two
    times.
    """
    trace = tuple(stream_trace(path, max_requests=MAX_REQUESTS))
    if len(trace) < 2 or trace[-1].offset_s == 0:
        raise RoseError(f"{path}: a trace needs two requests at different times")
    return trace


def _rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, float, int, int]]:
    reader = csv.reader(lines)
    header = next(reader, None)
    if header is None or [cell.strip() for cell in header] != COLUMNS:
        raise RoseError(f"{name}:1: the first line must be {','.join(COLUMNS)}")
    try:
        for row in filter(None, reader):  # without blank lines
            yield reader.line_num, *_parse_row(row)
    except (ValueError, csv.Error) as error:
        raise RoseError(f"{name}:{reader.line_num}: {error}") from error


def _parse_row(row: list[str]) -> tuple[float, int, int]:
    if len(row) != len(COLUMNS):
        raise ValueError(f"{len(row)} columns, expected {len(COLUMNS)}")
    return _timestamp_s(row[0]), _tokens(row[1], COLUMNS[1]), _tokens(row[2], COLUMNS[2])


def _timestamp_s(text: str) -> float:
    """Return the Unix seconds of a text like `2023-11-16 18:17:03.9799600`; without a zone it is
    UTC.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text!r}; write it as 2023-11-16 18:17:03.97") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(text: str, column: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{column} is {text[:80]!r}; give a whole number of tokens")
    digits = text.strip().lstrip("0") or "0"
    if len(digits) > len(str(MAX_TOKENS)) or int(digits) > MAX_TOKENS:
        raise ValueError(f"{column} is {digits[:20]}; a request has {MAX_TOKENS} tokens at most")
    return int(digits)


def _check_time(where: str, time_s: float, latest_s: float, max_gap_s: float) -> None:
    if time_s < latest_s:
        raise RoseError(f"{where}: TIMESTAMP: its time is before the line above; sort the trace")
    if latest_s > -inf and time_s - latest_s > max_gap_s:
        raise RoseError(
            f"{where}: TIMESTAMP: nothing for {time_s - latest_s:.4g} s before it, more than the"
            f" {max_gap_s:g} s that a gap may last; cut the trace there"
        )

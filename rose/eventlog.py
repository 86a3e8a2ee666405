"""Append-only JSON-lines logs: the raw records from which every figure is recomputed."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from rose.errors import RoseError

T = TypeVar("T")


class JsonlLog:
    """One file of JSON objects, a line each, on disk as soon as they are written."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, object]) -> None:
        """Append one record."""
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file; writing afterwards is an error."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


Listener = Callable[[str, Mapping[str, object]], None]


class EventLog:
    """What one process did: leases, revocations, restarts, faults (CLOCK_MONOTONIC seconds)."""

    def __init__(self, folder: Path, source: str) -> None:
        self._log = JsonlLog(folder / f"events-{source}.jsonl")
        self._source = source
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Tell one listener of every event, in the thread that writes it."""
        self._listener = listener

    def write(self, event: str, **fields: object) -> None:
        """Append one event, stamped with the time and this process's name."""
        self._log.write({"t_s": time.monotonic(), "source": self._source, "event": event, **fields})
        if self._listener:
            self._listener(event, fields)

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def read_lines(path: Path, schema: type[T]) -> list[T]:
    """The records of one file; a last line that its writer did not finish is left out.

    Raises `RoseError` naming file and line for anything else that is not such a record.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RoseError(
            f"{path}: cannot be read ({error.strerror}); is the run complete?"
        ) from error
    decoder = msgspec.json.Decoder(schema)
    records = []
    # What follows the last newline is empty, or the line a killed process was writing.
    for number, line in enumerate(lines[:-1], 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise RoseError(f"{path}:{number}: {error}") from error
    return records

"""Logs of one process: its events, and raw records from which figures are recomputed.

Writing to a log never fails and, for logs of `Logs`, never waits for a disk: a thread writes them.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from rose.clock import utc_text
from rose.errors import ConfigError, RoseError, decoded
from rose.logs.process_log import repeat
from rose.logs.rotating_jsonl import (
    BOUNDED,
    DROPPED,
    KEEP_ALL,
    BoundedFile,
    LogLimits,
    LogThread,
    log_parts,
    private_folder,
)

__all__ = ["KEEP_ALL", "EventLog", "JsonlLog", "LogLimits", "Logs", "log_parts", "read_lines"]

T = TypeVar("T")
FLUSH_S = 2.0
_logger = logging.getLogger("rose.logs")
_MARKER = b'{"' + DROPPED.encode() + b'":'
_NO_FIELDS: Mapping[str, object] = {}


class JsonlLog:
    """Rotated log file of JSON objects, one a line; any thread may write.

    See `rose.logs.rotating_jsonl`.
    """

    def __init__(
        self,
        path: Path,
        limits: LogLimits = BOUNDED,
        thread: LogThread | None = None,
        marker: Mapping[str, object] = _NO_FIELDS,
    ) -> None:
        """Open the log at `path`.

        thread: writes the lines; None writes at once, in the caller. marker: further fields of a
        line about dropped records.
        """
        self._file = BoundedFile(path, limits, marker)
        self._thread = thread
        self._listener: Callable[[Mapping[str, object]], None] | None = None
        if thread is None:
            self._file.begin()
        else:
            thread.put(self._file.begin)

    def listen(self, listener: Callable[[Mapping[str, object]], None]) -> None:
        """Set the one listener, called with every record by the thread that calls `write`."""
        self._listener = listener

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record, or drop and count it; raise nothing that the disk causes."""
        if self._listener:
            self._listener(record)
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        if self._thread is None:
            self._file.append(line)
        elif not self._thread.put(partial(self._file.append, line)):
            self._file.drop()

    @property
    def dropped(self) -> int:
        """Number of records lost since the start."""
        return self._file.dropped

    @property
    def trouble(self) -> str:
        """Reason why records are being dropped now; empty while none are."""
        return self._file.trouble

    def close(self) -> None:
        """Close the file as soon as all pending records are written."""
        if self._thread is None or not self._thread.put(self._file.close):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Listener = Callable[[str, Mapping[str, object]], None]


class EventLog:
    """Event log of one process: leases, revocations, restarts, faults.

    Each event has its wall-clock time in UTC (`time`) and its monotonic seconds (`t_s`).
    """

    def __init__(
        self,
        folder: Path,
        source: str,
        limits: LogLimits = BOUNDED,
        thread: LogThread | None = None,
    ) -> None:
        path = folder / f"events-{source}.jsonl"
        self.log = JsonlLog(path, limits, thread, {"source": source})
        self.log.listen(repeat("events"))
        self._source = source
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Set the one listener, called with each event's name and fields by the writing thread."""
        self._listener = listener

    def write(self, event: str, **fields: object) -> None:
        """Append one event, stamped with the time and this process's name.

        Then call the listener; its error is logged and not raised.
        """
        stamp = {"time": utc_text(time.time()), "t_s": time.monotonic(), "source": self._source}
        self.log.write({**stamp, "event": event, **fields})
        if self._listener:
            try:
                self._listener(event, fields)
            except Exception:  # whoever writes an event has more to do than to tell of it
                _logger.exception("nobody could be told of %s", event)

    def close(self) -> None:
        self.log.close()


class Logs:
    """All logs of one process in one folder, each under the same limits, written by one thread."""

    def __init__(self, folder: Path, limits: LogLimits = BOUNDED) -> None:
        """Make the folder and start the thread.

        Raises ConfigError for a folder that this user cannot have.
        """
        self._folder = folder
        self._limits = limits
        self._thread = LogThread("rose-logs")
        self._logs: list[JsonlLog] = []
        _insist_usable(folder)

    def events(self, source: str) -> EventLog:
        """Return a new event log `events-<source>.jsonl`; `source` names this process."""
        events = EventLog(self._folder, source, self._limits, self._thread)
        self._logs.append(events.log)
        return events

    def records(self, name: str) -> JsonlLog:
        """Return a new log of raw records in the file `name`."""
        log = JsonlLog(self._folder / name, self._limits, self._thread)
        self._logs.append(log)
        return log

    @property
    def dropped(self) -> int:
        """Number of records lost by all logs since the start."""
        return sum(log.dropped for log in self._logs)

    def troubles(self) -> list[str]:
        """Return the present faults of the logs, one line each; empty if all is well."""
        lines = [f"log {trouble}" for log in self._logs if (trouble := log.trouble)]
        hung_s = self._thread.hung_s()
        return [*lines, f"a write to {self._folder} hangs for {hung_s:.0f} s"] if hung_s else lines

    def flush(self, patience_s: float = FLUSH_S) -> bool:
        """Wait until all earlier records are written; return False after `patience_s`."""
        return self._thread.flush(patience_s)

    def close(self) -> None:
        """Close all logs, waiting FLUSH_S at most for a disk that hangs."""
        for log in self._logs:
            log.close()
        self._thread.close(FLUSH_S)


def read_lines(path: Path, schema: type[T]) -> list[T]:
    """Return the records of one log, those of its older parts first.

    A last line that its writer did not finish is left out. Raises `RoseError` naming file and line
    for any other invalid record, and if records were dropped: figures computed from the rest would
    be wrong.
    """
    records: list[T] = []
    decoder = msgspec.json.Decoder(schema)
    for part in log_parts(path) or [path]:
        try:
            lines = part.read_bytes().split(b"\n")
        except OSError as error:
            raise RoseError(
                f"{part}: cannot be read ({error.strerror}); is the run complete?"
            ) from error
        # The part after the last newline is empty, or a line that a killed process was writing.
        for number, line in enumerate(lines[:-1], 1):
            if line.startswith(_MARKER):
                raise RoseError(f"{part}:{number}: records are missing: {_reason(line)}; run again")
            try:
                records.append(decoded(decoder, line))
            except msgspec.DecodeError as error:
                raise RoseError(f"{part}:{number}: {error}") from error
    return records


class _Missing(msgspec.Struct):
    records_dropped: int
    message: str = ""


_MISSING = msgspec.json.Decoder(_Missing)


def _reason(line: bytes) -> str:
    try:
        missing = decoded(_MISSING, line)
    except msgspec.DecodeError:
        return "how many is not said"
    return f"{missing.records_dropped} ({missing.message})"


def _insist_usable(folder: Path) -> None:
    try:
        private_folder(folder)
    except OSError as error:
        if isinstance(error, (PermissionError, NotADirectoryError, FileExistsError)):
            raise ConfigError(f"logs cannot be kept in {folder}: {error.strerror}") from error
        return  # A full disk may have room later.
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"logs cannot be kept in {folder}: it is not writable for this user")

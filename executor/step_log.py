"""Log of an engine's steps and arrivals, for measurements only: off unless ROSE_STEP_LOG is set.

    0      magic, layout version, capacity in records, count
    32     records of seven int64: kind, begin_ns, end_ns, cpu_ns, tokens, sequences, sampled

The file is mapped, so a record costs a copy of 56 bytes and survives `kill -9` of its writer. Its
room on disk is taken at the start, since a write to a mapped hole of a full disk would end the
engine. A full log takes no more. Times are CLOCK_MONOTONIC.
"""

import errno
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from executor.errors import PageError

_LOG = logging.getLogger("vllm.rose.step_log")
STEP_LOG: Final = "ROSE_STEP_LOG"
MAGIC: Final = b"ROSESTEP"
VERSION: Final = 1
CAPACITY: Final = 4_000_000
HEADER: Final = struct.Struct("=8sqqq")
RECORD: Final = struct.Struct("=7q")
STEP, ARRIVAL = 1, 2
_COUNT_WORD: Final = 3


class StepRecord(NamedTuple):
    """One record of the step log, an engine step or an arrival by `kind`; times in nanoseconds.

    STEP: `tokens` were scheduled for `sequences`, `sampled` new tokens came out; `cpu_ns` is
    processor time of the engine's thread. ARRIVAL: a request of `tokens` came at `begin_ns`, and
    the engine saw it at `end_ns`.
    """

    kind: int
    begin_ns: int
    end_ns: int
    cpu_ns: int
    tokens: int
    sequences: int
    sampled: int


class NoRoomError(PageError):
    """Error: the disk has no room for a whole step log."""


class StepLog:
    """Memory-mapped log file of an engine process, with one writing thread; once full it stops."""

    def __init__(
        self,
        path: Path,
        capacity: int = CAPACITY,
        thread_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        """Create the file with room for `capacity` records.

        thread_ns: clock of the calling thread's processor time. Raises PageError if the file cannot
        be made, NoRoomError if the disk is full.
        """
        size = HEADER.size + capacity * RECORD.size
        try:
            with path.open("xb+") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self._mapping = mmap.mmap(file.fileno(), size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                path.unlink(missing_ok=True)
                raise NoRoomError(f"no room for step log {path}") from error
            raise PageError(f"cannot make step log {path}: {error.strerror}") from error
        HEADER.pack_into(self._mapping, 0, MAGIC, VERSION, capacity, 0)
        self._words = memoryview(self._mapping)[: HEADER.size].cast("q")
        self._capacity = capacity
        self._count = 0
        self._thread_ns = thread_ns
        self._began_cpu_ns = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], role: str) -> "StepLog | None":
        """Return a new log in the folder that ROSE_STEP_LOG names; None if that is unset.

        None, with a warning, also if the disk is full: no measurement may end the engine. Raises
        PageError.
        """
        folder = environ.get(STEP_LOG)
        if not folder:
            return None
        try:
            return cls(Path(folder) / f"steps-{role}-{os.getpid()}.bin")
        except NoRoomError as error:
            _LOG.warning("%s; this engine logs no steps", error)
            return None

    def begin(self) -> None:
        """Start the processor-time measurement of a step, in the thread that runs it."""
        self._began_cpu_ns = self._thread_ns()

    def step(
        self, begin_ns: int, end_ns: int, tokens: int, sequences: int, sampled: int = 0
    ) -> None:
        """Append the record of an ended step, and start the next one's processor-time measurement.

        Call it in the thread that called `begin`.
        """
        cpu_ns = self._thread_ns()
        used_ns, self._began_cpu_ns = cpu_ns - self._began_cpu_ns, cpu_ns
        self._append(STEP, begin_ns, end_ns, used_ns, tokens, sequences, sampled)

    def arrival(self, arrived_ns: int, seen_ns: int, prompt_tokens: int) -> None:
        """Append the record of a request's arrival: when it came, and when the engine saw it."""
        self._append(ARRIVAL, arrived_ns, seen_ns, 0, prompt_tokens, 1, 0)

    def _append(self, *record: int) -> None:
        if self._count >= self._capacity:
            return
        RECORD.pack_into(self._mapping, HEADER.size + self._count * RECORD.size, *record)
        self._count += 1
        # Last, so that a reader never counts a record that is not whole.
        self._words[_COUNT_WORD] = self._count


def checked_records(raw: bytes) -> bytes:
    """Return a step log's records as bytes, without its header. Raises ValueError.

    Magic, version and length are checked. `raw` may end right after the last used record.
    """
    if len(raw) < HEADER.size:
        raise ValueError("too short for a step log")
    magic, version, _, count = HEADER.unpack_from(raw)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"no step log of version {VERSION}")
    body = raw[HEADER.size : HEADER.size + count * RECORD.size]
    if len(body) < count * RECORD.size:
        raise ValueError(f"a step log of {count} records is cut short")
    return body


def read_step_log(raw: bytes) -> list[StepRecord]:
    """Return the records in a step log's bytes. Raises ValueError for any other file."""
    return [StepRecord(*fields) for fields in RECORD.iter_unpack(checked_records(raw))]


def used_bytes(header: bytes) -> int:
    """Return the length of a log up to its last record, from its first HEADER.size bytes."""
    return HEADER.size + int(HEADER.unpack(header)[3]) * RECORD.size

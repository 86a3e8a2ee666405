"""Rotating log files of JSON lines: bounded in size, written by a thread, no error to the caller.

The thread waits for slow disks and pipes, so that no other thread has to.

A record that cannot be written (disk full, I/O error, folder gone) is dropped and counted. The file
is tried again every RETRY_S, and its first line after that says how many records are missing:
    {"records_dropped":12,"t_s":…,"time":…,"event":"records_dropped","message":"No space left"}
A line is there whole or not at all. Parts, oldest first: `x.jsonl.2`, `x.jsonl.1`, `x.jsonl`.
"""

import contextlib
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.clock import utc_text
from rose.errors import ConfigError

# Lines that wait for a slow disk: some minutes of a node's samples.
WAITING = 8_192
# A write that takes longer than that is reported.
HUNG_S = 5.0

_logger = logging.getLogger("rose.logs")


class LogThread:
    """Daemon thread that carries out queued writes in order.

    More than `waiting` pending writes are refused at once.
    """

    def __init__(self, name: str, waiting: int = WAITING) -> None:
        # A SimpleQueue, because a signal handler may put while its thread is putting.
        self._writes: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._waiting = waiting
        self._since_s: float | None = None
        self._closed = False
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, write: Callable[[], object]) -> bool:
        """Queue a write and return True; return False, without it, if too many are pending."""
        if self._closed or self._writes.qsize() >= self._waiting:
            return False
        self._writes.put(write)
        return True

    def hung_s(self) -> float:
        """Return the seconds that the present write has lasted; 0 below HUNG_S."""
        since_s = self._since_s
        lasted_s = 0.0 if since_s is None else time.monotonic() - since_s
        return lasted_s if lasted_s >= HUNG_S else 0.0

    def flush(self, patience_s: float) -> bool:
        """Wait for all earlier writes; return False if that takes longer than `patience_s`."""
        done = threading.Event()
        self._writes.put(done.set)
        return done.wait(patience_s)

    def close(self, patience_s: float) -> None:
        """Carry out the pending writes, waiting `patience_s` at most, and end the thread."""
        if not self._closed:
            self._closed = True
            self._writes.put(None)
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (write := self._writes.get()) is not None:
            self._since_s = time.monotonic()
            try:
                write()
            except Exception:  # a write keeps its own errors: this one is a fault of the program
                _logger.exception("a log could not be written")
            self._since_s = None


DROPPED = "records_dropped"
# Pause after a failed write, and between checks that the file still has its name.
RETRY_S = 1.0
LEAST_FILE_BYTES = 4 << 10
TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LogLimits:
    """Disk space of one log: `files` files of `file_bytes` each; `file_bytes` None keeps all.

    Raises ConfigError for limits under which nothing could be kept.
    """

    file_bytes: int | None = 64 << 20
    files: int = 4

    def __post_init__(self) -> None:
        if self.file_bytes is not None and self.file_bytes < LEAST_FILE_BYTES:
            raise ConfigError(
                f"log files of {self.file_bytes} bytes are too small; "
                f"give {LEAST_FILE_BYTES} or more"
            )
        if self.files < 2:
            raise ConfigError(f"{self.files} log files are too few to rotate; give 2 or more")


BOUNDED = LogLimits()
KEEP_ALL = LogLimits(file_bytes=None)
"""Limits for runs whose figures need every record."""


class BoundedFile:
    """Rotated file of one log; `append` raises nothing, and `dropped` counts the lost records."""

    def __init__(
        self,
        path: Path,
        limits: LogLimits,
        marker: Mapping[str, object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the object, without opening the file.

        marker: further fields of a line about dropped records. clock: monotonic seconds.
        """
        self.dropped = 0
        self._path = path
        self._limits = limits
        self._marker = marker
        self._clock = clock
        self._writing = threading.Lock()
        # Never held while a disk is waited for: a caller that drops a record continues at once.
        # Reentrant, since a signal handler may drop a record while its thread drops one.
        self._counting = threading.RLock()
        self._unsaid = 0
        self._descriptor: int | None = None
        self._size = 0
        self._torn = False
        self._looked_s = 0.0
        self._retry_s: float | None = None
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """Reason why records are being dropped now; empty while none are."""
        return f"{self._path.name}: {self._trouble}" if self._trouble else ""

    def begin(self) -> None:
        """Create the file, so that a log without records is an empty file, not a missing one."""
        with self._writing:
            try:
                self._ready(self._clock(), 0)
            except OSError as error:
                self._failed(error)

    def append(self, line: bytes) -> None:
        """Write one line, which ends with a newline, or drop and count it."""
        with self._writing:
            now_s = self._clock()
            if self._retry_s is not None and now_s < self._retry_s:
                self.drop()
                return
            try:
                self._ready(now_s, len(line))
                self._confess()
                self._write(line)
            except OSError as error:
                self.drop()
                self._failed(error)
            else:
                self._recovered()

    def drop(self) -> None:
        """Count a record that will not be written; for any thread, without waiting."""
        with self._counting:
            self.dropped += 1
            self._unsaid += 1

    def close(self) -> None:
        """Close the file after a line about dropped records. A later `append` opens it again."""
        with self._writing:
            with contextlib.suppress(OSError):
                if self._unsaid:
                    self._ready(self._clock(), 0)
                    self._confess()
            self._leave()

    def _ready(self, now_s: float, wanted: int) -> None:
        if self._descriptor is not None and now_s - self._looked_s >= RETRY_S:
            self._looked_s = now_s
            if not self._in_place(self._descriptor):
                self._leave()
        if self._descriptor is None:
            self._open()
            self._looked_s = now_s
        most = self._limits.file_bytes
        if most is not None and self._size and self._size + wanted > most:
            self._leave()
            rotate_parts(self._path, self._limits.files)
            self._open()

    def _in_place(self, descriptor: int) -> bool:
        """Return True if the path still names the open file; in a removed one records are lost."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        here = os.fstat(descriptor)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def _open(self) -> None:
        private_folder(self._path.parent)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self._size, self._torn = _without_torn_line(self._descriptor)

    def _confess(self) -> None:
        with self._counting:
            unsaid = self._unsaid
        if not unsaid:
            return
        when = {"t_s": time.monotonic(), "time": utc_text(time.time())}
        said = {DROPPED: unsaid, **when, "event": DROPPED, **self._marker}
        why = self._trouble or "more records than the disk took"
        self._write(json.dumps({**said, "message": why}, separators=(",", ":")).encode() + b"\n")
        with self._counting:
            self._unsaid -= unsaid

    def _write(self, line: bytes) -> None:
        assert self._descriptor is not None
        # Half a line that cannot be removed stays a line of its own.
        data = b"\n" + line if self._torn else line
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError:
            if done:
                # Tried again when the file is next opened.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            raise
        self._torn = False
        self._size += done

    def _failed(self, error: OSError) -> None:
        self._leave()
        self._retry_s = self._clock() + RETRY_S
        if not self._trouble:
            _logger.warning(
                "%s cannot be written (%s): records are dropped until it can",
                self._path,
                error.strerror or error,
            )
        self._trouble = error.strerror or str(error)

    def _recovered(self) -> None:
        self._retry_s = None
        if self._trouble:
            self._trouble = ""
            _logger.warning("%s is written again; %d records are lost", self._path, self.dropped)

    def _leave(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def log_parts(path: Path) -> list[Path]:
    """Return the existing files of one log, oldest first."""
    parts = [each for _, each in sorted(_rotated(path), reverse=True)]
    return [*parts, path] if path.exists() else parts


def private_folder(path: Path) -> None:
    """Create a folder, and those above it, for this user alone. Raises OSError."""
    if path.is_dir():
        return
    if path.parent != path:
        private_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def trim_output(path: Path, limits: LogLimits) -> bool:
    """Empty the file at `path` if a child's output there exceeds `file_bytes`; return True if so.

    Its last `file_bytes` go to `path.1`, or are lost if the disk has no room for both. The child
    must write with O_APPEND. Raises nothing.
    """
    most = limits.file_bytes
    try:
        if most is None or path.stat().st_size <= most:
            return False
        keep = path.with_name(f"{path.name}.1")
        try:
            _copy_tail(path, keep, most)
        except OSError:
            keep.unlink(missing_ok=True)
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def _copy_tail(path: Path, to: Path, most: int) -> None:
    with path.open("rb") as source:
        source.seek(-most, os.SEEK_END)
        descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            left = most
            while left and (block := source.read(min(left, TAIL_BYTES))):
                target.write(block)
                left -= len(block)


def _rotated(path: Path) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(path.name) + r"\.(\d{1,6})")
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    found = [(match, path.with_name(name)) for name in names if (match := pattern.fullmatch(name))]
    return [(int(match[1]), each) for match, each in found]


def rotate_parts(path: Path, files: int) -> None:
    """Rename a log to part 1 and each part to the next number, and delete the oldest, so that at
    most `files` remain with the new log. Raises OSError.
    """
    for age, part in sorted(_rotated(path), reverse=True):
        if age >= files - 1:
            part.unlink(missing_ok=True)
        else:
            part.rename(path.with_name(f"{path.name}.{age + 1}"))
    path.rename(path.with_name(f"{path.name}.1"))


def _without_torn_line(descriptor: int) -> tuple[int, bool]:
    """Cut off an unfinished last line; return the file's size, and True if that failed."""
    size = os.fstat(descriptor).st_size
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return size, False
    begin = max(0, size - TAIL_BYTES)
    whole = begin + os.pread(descriptor, size - begin, begin).rfind(b"\n") + 1
    if whole == begin and begin:
        return size, True
    try:
        os.ftruncate(descriptor, whole)
    except OSError:
        return size, True
    return whole, False

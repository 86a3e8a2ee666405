"""Audit log: grants, revocations, policy changes, kills and activations as a chain of hashes.

    {"n":7,"time":"2026-11-26T16:12:24.123Z","t":…,"source":"scheduler","event":"lease_granted",…,"prev":H6,"hash":H7}

`hash` is the SHA-256 of the line before it and of `prev`, so a line that is edited, removed or
swapped breaks the chain, unless it is among the last. `audit-NAME.head` covers those: it has the
number and hash of the newest line, and the number of the oldest. Keep a copy on another machine.

Files rotate as logs do, and the chain continues from part to part and from one life of the
process to the next. A record that cannot be written is counted, and the next one says how many
are missing: the process that grants never waits for a disk.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from rose.clock import utc_text
from rose.errors import ConfigError, decoded
from rose.logs.process_log import repeat
from rose.logs.rotating_jsonl import LogLimits, LogThread, log_parts, private_folder, rotate_parts

AUDIT_LIMITS: Final = LogLimits(64 << 20, 16)
START: Final = "0" * 64
MAX_FIELDS_CHARS: Final = 16 << 10
MAX_CUT_CHARS: Final = 4 << 10
# JSON escapes a character in six bytes at most; the rest is room for the other fields.
MAX_LINE_BYTES: Final = 128 << 10
CLOSE_S = 2.0
MOST_WRITERS = 16
_HEAD_BYTES = 256
_logger = logging.getLogger("rose.audit")
_repeat = repeat("audit")


def audit_file(folder: Path, source: str) -> Path:
    """Return the path of a process's audit log, FOLDER/audit-SOURCE.jsonl.

    Several processes may share a folder.
    """
    return folder / f"audit-{source}.jsonl"


class Record(msgspec.Struct):
    """One line of an audit log.

    n: number in the chain. t: Unix seconds. time: the same in RFC 3339, "" in older records. by:
    the operator who asked, "" if none. lost: number of records before it that could not be written.
    """

    n: int
    t: float
    source: str
    event: str
    fields: dict[str, Any]
    prev: str
    hash: str
    by: str = ""
    lost: int = 0
    time: str = ""


class Head(msgspec.Struct, frozen=True):
    """End of an audit log's chain: number and hash of the newest record, and number of the oldest
    record that is kept.
    """

    n: int
    hash: str
    first: int


_RECORD = msgspec.json.Decoder(Record)
_HEAD = msgspec.json.Decoder(Head)


def sealed(body: dict[str, object], prev: str) -> tuple[bytes, str]:
    """Return the line of an audit record (JSON with its SHA-256, newline-terminated) and that hash
    in hex.

    prev: hash of the record before it.
    """
    text = json.dumps({**body, "prev": prev}, separators=(",", ":"), default=str).encode()
    digest = hashlib.sha256(text).hexdigest()
    return text[:-1] + b',"hash":"' + digest.encode() + b'"}\n', digest


def opened(line: bytes) -> Record:
    """Return the record in one line of an audit log.

    Raises ValueError if the line is no record, or does not match its hash.
    """
    body, mark, rest = line.rpartition(b',"hash":"')
    if not mark or len(line) > MAX_LINE_BYTES or len(rest) != 64 + len(b'"}'):
        raise ValueError("it is no record")
    try:
        record = decoded(_RECORD, line)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is no record: {error}") from error
    if hashlib.sha256(body + b"}").hexdigest() != record.hash:
        raise ValueError("its hash is another one: it was edited")
    return record


class AuditLog:
    """Writer of one file's chain of hashes.

    Any thread may write; a thread of its own does the file's IO. End it with `close`.
    """

    def __init__(
        self,
        path: Path,
        source: str,
        limits: LogLimits = AUDIT_LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file and continue its chain. clock: Unix seconds. Raises ConfigError if this
        user may not write it.

        A chain that another process writes is left alone: a second writer gets `NAME-2`, and so on.
        Other errors of the disk are counted as lost records.
        """
        self._lock: int | None = None
        self._path = path = self._own(path)
        self._head_path = path.with_suffix(".head")
        self._source = source
        self._limits = limits
        self._clock = clock
        self._lost = 0
        # A signal handler may write while the thread that it interrupts writes.
        self._counting = threading.RLock()
        self._trouble = ""
        self._descriptor: int | None = None
        self._size = 0
        try:
            private_folder(path.parent)
            self._head = self._resumed()
        except PermissionError as error:
            raise ConfigError(f"{path} cannot be kept ({error.strerror})") from error
        except OSError as error:
            self._head = Head(0, START, 1)
            self._failed(error)
        self._thread = LogThread("rose-audit")

    def write(self, event: str, fields: dict[str, object], by: str = "") -> None:
        """Queue an audit record for the log's thread, and return at once. by: the operator who
        asked, or "" if the process decided.

        A record that does not fit the queue is counted as lost. Fields of more than
        MAX_FIELDS_CHARS are cut.
        """
        # Encode now: the caller may change the fields before the thread writes them.
        text = _clean(json.dumps(fields, separators=(",", ":"), default=str, ensure_ascii=False))
        said = {"cut": text[:MAX_CUT_CHARS]}
        if len(text) <= MAX_FIELDS_CHARS:
            said = json.loads(text, parse_constant=str)
        now_s = self._clock()
        body = {"time": utc_text(now_s), "t": now_s, "source": self._source, "event": event}
        body["by"] = _clean(by)[:400]
        if not self._thread.put(partial(self._append, {**body, "fields": said})):
            self._lose()

    @property
    def path(self) -> Path:
        return self._path

    @property
    def records(self) -> int:
        """Number of the newest record, counted over all lives of the process."""
        return self._head.n

    @property
    def lost(self) -> int:
        """Number of records that could not be written since the newest written one."""
        return self._lost

    def troubles(self) -> list[str]:
        """Return one line that says why records are being lost; an empty list while none are."""
        return [f"log {self._path.name}: {self._trouble}"] if self._trouble else []

    def flush(self, patience_s: float = CLOSE_S) -> bool:
        """Wait until all earlier audit records are written or lost; return False if that takes
        longer than `patience_s` seconds.
        """
        return self._thread.flush(patience_s)

    def close(self) -> None:
        """Write the pending audit records, for at most CLOSE_S seconds, and release the file and
        its lock.
        """
        self._thread.close(CLOSE_S)
        self._leave()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _own(self, path: Path) -> Path:
        """Lock the first of the names NAME, NAME-2, … that no other process writes, and return it;
        NAME itself if none can be locked.
        """
        for number in range(1, MOST_WRITERS + 1):
            name = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
            try:
                private_folder(name.parent)
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
                lock = os.open(name.with_suffix(".lock"), flags, 0o600)
            except OSError:
                break  # nothing can be written there: that is said by who tries
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            self._lock = lock
            return name
        return path

    # ---- in the log's thread ----

    def _append(self, body: dict[str, object]) -> None:
        with self._counting:
            lost = self._lost
        head = self._head
        missing = {"lost": lost} if lost else {}
        numbered = {"n": head.n + 1, **body, **missing}
        line, digest = sealed(numbered, head.hash)
        try:
            self._ready(len(line))
            self._put(line)
        except OSError as error:
            self._lose()
            self._failed(error)
            _repeat(body)
            return
        _repeat({**numbered, "prev": head.hash, "hash": digest})
        with self._counting:
            self._lost -= lost
        self._head = Head(head.n + 1, digest, self._head.first)
        self._save_head()
        if self._trouble:
            self._trouble = ""
            _logger.warning("%s is written again; its next record says what is missing", self._path)

    def _ready(self, wanted: int) -> None:
        if self._descriptor is not None and not self._in_place():
            self._leave()
        if self._descriptor is None:
            self._open()
        most = self._limits.file_bytes
        if most is not None and self._size and self._size + wanted > most:
            self._leave()
            rotate_parts(self._path, self._limits.files)
            oldest = log_parts(self._path)
            first = _first_of(oldest[0]) if oldest else self._head.n + 1
            self._head = Head(self._head.n, self._head.hash, first)
            self._open()

    def _put(self, line: bytes) -> None:
        assert self._descriptor is not None
        done = 0
        try:
            while done < len(line):
                done += os.write(self._descriptor, line[done:])
            os.fdatasync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += done

    def _save_head(self) -> None:
        text = msgspec.json.encode(self._head).ljust(_HEAD_BYTES - 1) + b"\n"
        try:
            descriptor = os.open(self._head_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, text, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._failed(error)

    def _open(self) -> None:
        private_folder(self._path.parent)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _in_place(self) -> bool:
        assert self._descriptor is not None
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        here = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def _leave(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _lose(self) -> None:
        with self._counting:
            self._lost += 1

    def _failed(self, error: OSError) -> None:
        self._leave()
        if not self._trouble:
            _logger.warning("%s cannot be written (%s)", self._path, error.strerror or error)
        self._trouble = error.strerror or str(error)

    def _resumed(self) -> Head:
        """Return the head from which the chain continues: the last line's, or the saved one if that
        is newer.
        """
        saved = _saved_head(self._head_path)
        self._open()
        assert self._descriptor is not None
        self._size = _without_torn_end(self._descriptor, self._size)
        last = _last_of(log_parts(self._path))
        if last is None or (saved is not None and saved.n > last.n):
            # The file was cut: the next record does not follow its last line, and `verify` says so.
            return saved or Head(0, START, 1)
        return Head(last.n, last.hash, saved.first if saved else 1)


def _clean(text: str) -> str:
    """Return the text with characters that UTF-8 cannot hold replaced by `?`."""
    return text.encode("utf-8", "replace").decode()


def _saved_head(path: Path) -> Head | None:
    try:
        return decoded(_HEAD, path.read_bytes()[:_HEAD_BYTES])
    except (OSError, msgspec.DecodeError):
        return None


def _without_torn_end(descriptor: int, size: int) -> int:
    """Cut off the line that a killed process did not finish; return the file's size after it."""
    begin = max(0, size - MAX_LINE_BYTES)
    tail = os.pread(descriptor, size - begin, begin)
    whole = begin + tail.rfind(b"\n") + 1
    if whole != size and (whole > begin or begin == 0):
        os.ftruncate(descriptor, whole)
        return whole
    return size


def _last_of(parts: list[Path]) -> Record | None:
    for part in reversed(parts):
        with part.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LINE_BYTES - 1))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                return opened(line)
    return None


def _first_of(part: Path) -> int:
    with part.open("rb") as file:
        try:
            return opened(file.readline(MAX_LINE_BYTES).rstrip(b"\n")).n
        except ValueError:
            return 1


# ---- reading ----


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """Result of `verify`.

    records: number of records in the unbroken chain. head: its end. lost: number of records that
    could not be written. wrong: its first fault, or "".
    """

    records: int
    head: Head
    lost: int
    wrong: str


def read(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each line of an audit log's files, oldest first, with its place FILE:LINE.

    Raises ConfigError if there is no such log.
    """
    parts = log_parts(path)
    if not parts:
        raise ConfigError(f"{path} is no file; give LOG_DIR/audit-NAME.jsonl")
    for part in parts:
        try:
            with part.open("rb") as file:
                for number, line in enumerate(file, 1):
                    yield f"{part}:{number}", line.rstrip(b"\n")
        except OSError as error:
            raise ConfigError(f"{part} cannot be read ({error.strerror})") from error


def verify(path: Path, known: tuple[int, str] | None = None) -> ChainVerdict:
    """Follow an audit log's chain of hashes from its oldest kept record, and return the verdict.

    known: number and hash of a record that was kept elsewhere, which must be in the chain. Raises
    ConfigError if there is no such log.
    """
    head = _saved_head(path.with_suffix(".head"))
    found, prev, records, lost = Head(0, START, 0), "", 0, 0
    seen_known = known is None or known[0] == 0
    wrong = ""
    for place, line in read(path):
        try:
            record = opened(line)
        except ValueError as error:
            wrong = f"{place}: {error}"
            break
        if records == 0:
            first = record.n
            prev = START if first == 1 else record.prev
        if record.n != first + records or record.prev != prev:
            wrong = (
                f"{place}: record {record.n} does not follow record {found.n}: lines are missing"
                " or were swapped"
            )
            break
        if known is not None and record.n == known[0]:
            seen_known = True
            if record.hash != known[1]:
                wrong = f"{place}: record {record.n} is not the one you know"
                break
        found, prev = Head(record.n, record.hash, first), record.hash
        records, lost = records + 1, lost + record.lost
    wrong = wrong or _missing(path, head, found, known, seen_known)
    return ChainVerdict(records, found, lost, wrong)


def _missing(
    path: Path, head: Head | None, found: Head, known: tuple[int, str] | None, seen_known: bool
) -> str:
    """Return the fault that only the saved head or the known record shows; "" if there is none."""
    if head is None:
        return f"{path.with_suffix('.head')} is missing: nobody knows which record is the last"
    if found.n < head.n:
        return f"{path}: records {found.n + 1} to {head.n} are missing at the end"
    if found.n == head.n and found.hash != head.hash:
        return f"{path}: its last record is not the one that was written"
    if found.first > head.first:
        return f"{path}: records {head.first} to {found.first - 1} are missing at the beginning"
    if known is not None and not seen_known:
        return f"{path}: record {known[0]}, which you know, is not in it"
    return ""

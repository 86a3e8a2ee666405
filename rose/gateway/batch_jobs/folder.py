"""Folder of batch jobs: all that a gateway must not forget, so that any gateway can go on.

    root/files/<id>.jsonl      a file's bytes: what a caller uploaded, or what a batch answered
    root/files/<id>.json       its description; without it there is no file
    root/batches/<id>.json     the batch, as its callers see it, and who they are
    root/batches/<id>.lock     held by the gateway that runs the batch, while it lives (flock)
    root/batches/<id>.cancel   there once somebody cancels it
    root/batches/<id>.answers  answered requests, a line each, appended and flushed to disk
    root/batches/<id>.faults   requests that failed, likewise

JSON files are replaced whole. A request is answered once its line is on disk; a line that a power
cut or SIGKILL has torn is cut off, and its request is sent anew. Everything here blocks: call it in
a thread.
"""

import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from rose.errors import ConfigError
from rose.gateway.errors import TurnError
from rose.security.callers import Caller

FILE_ID: Final = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{24}")
DRAFT: Final = ".tmp-"
# A draft this old is of an upload that was broken off.
DRAFT_S: Final = 86_400.0
ANSWERS, FAULTS = "answers", "faults"
OVER: Final = frozenset({"failed", "completed", "expired", "cancelled"})


class NotHere(TurnError):  # noqa: N818 - named as in HTTP
    """Error 404: no file or batch of the caller has this id."""

    status = 404
    kind = "NotFoundError"


class FileObject(Struct):
    """Description of a file, as OpenAI's API shows it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class StoredFile(Struct):
    """A file and its owner: the scope of the caller's names."""

    shown: FileObject
    scope: str


class LineFault(Struct):
    """Fault of a batch's file, at a line from 1 on."""

    code: str
    line: int | None
    message: str
    param: str | None = None


class BatchErrors(Struct):
    data: list[LineFault]
    object: str = "list"


class RequestCounts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, kw_only=True):
    """A batch, as OpenAI's API shows it; times are Unix seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchRecord(Struct):
    """A batch, its caller, and the job that its requests are of.

    ending: the status that it ends with, once nothing more is sent.
    """

    shown: Batch
    caller_job: str | None
    caller_subject: str
    job: str = ""
    ending: str = ""

    @property
    def caller(self) -> Caller:
        """Caller that made the batch; its requests are that caller's."""
        return Caller(self.caller_job, self.caller_subject)

    @property
    def over(self) -> bool:
        """True if nothing of the batch is left to do."""
        return self.shown.status in OVER


class _Named(Struct):
    custom_id: str | UnsetType = UNSET


_decode_file = msgspec.json.Decoder(StoredFile).decode
_decode_batch = msgspec.json.Decoder(BatchRecord).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


class BatchFolder:
    """Files and batches below one folder, which several gateways may share."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        """Create the folders, and remove uploads that were broken off long ago. Raises ConfigError.

        most_bytes: bytes of all files and answers together above which no file is taken.
        """
        self._files, self._batches = root / "files", root / "batches"
        self._most_bytes = most_bytes
        try:
            for folder in (self._files, self._batches):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            undescribed = (
                each
                for each in self._files.glob("*.jsonl")
                if not each.with_suffix(".json").exists()
            )
            for draft in (*self._files.glob(f"{DRAFT}*"), *undescribed):
                with suppress(FileNotFoundError):
                    if time.time() - draft.stat().st_mtime > DRAFT_S:
                        draft.unlink()
        except OSError as error:
            raise ConfigError(f"--batch-dir {root}: {error.strerror}; name a folder") from error

    # ---- files ----

    def room(self) -> int:
        """Return the number of bytes that more files may have; answers of running batches count."""
        size = 0
        for path in (*self._files.iterdir(), *self._batches.iterdir()):
            with suppress(FileNotFoundError):  # It was deleted meanwhile.
                size += path.stat().st_size
        return max(0, self._most_bytes - size)

    def draft(self) -> Path:
        """Return the path of a new file that is being written, for `keep`."""
        return self._files / f"{DRAFT}{secrets.token_hex(12)}"

    def keep(
        self, draft: Path, name: str, purpose: str, scope: str, file_id: str = ""
    ) -> FileObject:
        """Make a file of a draft whose bytes are on disk, and return its description."""
        file_id = file_id or f"file-{secrets.token_hex(12)}"
        shown = FileObject(file_id, draft.stat().st_size, int(time.time()), name, purpose)
        described = _encode(StoredFile(shown, scope))
        draft.replace(self._bytes_of(file_id))
        _replace(self._files / f"{file_id}.json", described)
        return shown

    def file(self, file_id: str, scope: str) -> FileObject:
        """Return the description of a caller's file. Raises NotHere."""
        if FILE_ID.fullmatch(file_id):
            with suppress(FileNotFoundError):
                stored = _decode_file((self._files / f"{file_id}.json").read_bytes())
                if stored.scope == scope:
                    return stored.shown
        raise NotHere(f"no file {file_id[:80]!r} is here; list them: GET /v1/files")

    def content(self, file_id: str, scope: str) -> Path:
        """Return the path of a caller's file. Raises NotHere."""
        self.file(file_id, scope)
        return self._bytes_of(file_id)

    def files(self, scope: str) -> list[FileObject]:
        """Return the descriptions of a caller's files, the newest first."""
        found = _all(self._files, _decode_file)
        shown = [each.shown for each in found if each.scope == scope]
        return sorted(shown, key=lambda each: (-each.created_at, each.id))

    def delete(self, file_id: str, scope: str) -> None:
        """Delete a caller's file. Raises NotHere."""
        self.file(file_id, scope)
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self._bytes_of(file_id).unlink(missing_ok=True)

    # ---- batches ----

    @staticmethod
    def new_batch_id() -> str:
        return f"batch_{secrets.token_hex(12)}"

    def save(self, record: BatchRecord) -> None:
        """Replace a batch's record on disk."""
        _replace(self._batches / f"{record.shown.id}.json", _encode(record))

    def record(self, batch_id: str) -> BatchRecord:
        """Return the batch of this id, whosever it is. Raises FileNotFoundError."""
        return self.told(_decode_batch((self._batches / f"{batch_id}.json").read_bytes()))

    def batch(self, batch_id: str, scope: str) -> BatchRecord:
        """Return a caller's batch. Raises NotHere."""
        if BATCH_ID.fullmatch(batch_id):
            with suppress(FileNotFoundError):
                record = self.record(batch_id)
                if record.caller.scope == scope:
                    return record
        raise NotHere(f"no batch {batch_id[:80]!r} is here; list them: GET /v1/batches")

    def batches(self, scope: str) -> list[BatchRecord]:
        """Return a caller's batches, the newest first."""
        found = _all(self._batches, _decode_batch)
        mine = [self.told(each) for each in found if each.caller.scope == scope]
        return sorted(mine, key=lambda each: (-each.shown.created_at, each.shown.id))

    def unfinished(self, over: set[str]) -> list[str]:
        """Return the ids of all batches that are not over; those that are enter `over`, and are not
        read again.
        """
        found: list[str] = []
        for path in self._batches.glob("batch_*.json"):
            if path.stem not in over and self.record(path.stem).over:
                over.add(path.stem)
            elif path.stem not in over:
                found.append(path.stem)
        return found

    def cancel(self, record: BatchRecord) -> BatchRecord:
        """Have the gateway that runs a batch cancel it, and return the record as cancelling."""
        (self._batches / f"{record.shown.id}.cancel").touch()
        return self.told(record)

    def told(self, record: BatchRecord) -> BatchRecord:
        """Return the record, as cancelling if somebody cancels it: its gateway looks later."""
        batch = record.shown
        cancelled = (self._batches / f"{batch.id}.cancel").exists()
        if not record.over and batch.cancelling_at is None and cancelled:
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
        return record

    def clear(self, batch_id: str) -> None:
        """Remove what a batch that is over does not need."""
        for kind in ("cancel", "lock"):
            (self._batches / f"{batch_id}.{kind}").unlink(missing_ok=True)

    @contextmanager
    def held(self, batch_id: str) -> Iterator[bool]:
        """Return a context manager that gives True while this process alone may run the batch, and
        False if another one runs it.
        """
        with (self._batches / f"{batch_id}.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def answered(self, batch_id: str, kind: str) -> set[str]:
        """Return the custom ids of all lines of a log, which may be published already; a torn last
        line is cut off.
        """
        path, found = self._lines_of(batch_id, kind), set[str]()
        if not path.exists():
            return found
        whole = 0
        with path.open("r+b") as log:
            for line in log:
                try:
                    named = _decode_named(line).custom_id if line.endswith(b"\n") else UNSET
                except msgspec.MsgspecError:
                    named = UNSET
                if named is UNSET:
                    break
                found.add(named)
                whole += len(line)
            log.truncate(whole)
        return found

    def append(self, batch_id: str, kind: str, lines: Sequence[bytes]) -> None:
        """Append lines to a log, and flush them to disk."""
        if lines:
            with self._log(batch_id, kind).open("ab") as log:
                log.write(b"".join(lines))
                log.flush()
                os.fsync(log.fileno())

    def publish(self, record: BatchRecord, kind: str, name: str) -> str | None:
        """Make a caller's file of a batch's log and return its id; None for a log without lines.

        Called again after a crash, it returns the same id.
        """
        file_id, source = (
            _published_id(record.shown.id, kind),
            self._lines_of(record.shown.id, kind),
        )
        if not source.exists() or not source.stat().st_size:
            return None
        return self.keep(source, name, "batch_output", record.caller.scope, file_id).id

    def _bytes_of(self, file_id: str) -> Path:
        return self._files / f"{file_id}.jsonl"

    def _log(self, batch_id: str, kind: str) -> Path:
        return self._batches / f"{batch_id}.{kind}"

    def _lines_of(self, batch_id: str, kind: str) -> Path:
        log = self._log(batch_id, kind)
        return log if log.exists() else self._bytes_of(_published_id(batch_id, kind))


def _published_id(batch_id: str, kind: str) -> str:
    return f"file-{blake2b(f'{batch_id}/{kind}'.encode(), digest_size=12).hexdigest()}"


def _all(folder: Path, decode: Callable[[bytes], T]) -> Iterator[T]:
    """Yield what all whole JSON files of a folder hold."""
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            yield decode(path.read_bytes())


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole and durable: it has its old bytes or these."""
    draft = path.with_name(f"{DRAFT}{secrets.token_hex(12)}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        # A full disk leaves a part of it.
        draft.unlink(missing_ok=True)

"""SqliteStore: the store in one file, shared by the processes of one machine.

The file is written ahead (WAL) and synced on each commit. A log of changes feeds the watches, which
poll the store's revision; it keeps the newest `KEPT_REVISIONS`. SQLite is called in a thread of its
own: a locked file or a slow disk stops no event loop.

Leases are in a small file beside it, that all processes of the machine share:

    64 bytes          24 bytes for each lease
    boot id           id, TTL, end (seconds of CLOCK_BOOTTIME)

Not in the database, whose file another program may lock and whose disk may be full: a leader that
can write nothing for a while still leads. Renewing writes in place, into the page cache, which is
where the other processes look; it need not reach the disk, since no lease outlives its boot. The
clock counts suspended time. Each operation holds the file's lock for some microseconds.
"""

import asyncio
import fcntl
import os
import secrets
import sqlite3
import struct
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from rose.clock import boot_clock_s
from rose.errors import ConfigError, UnavailableError
from rose.store.protocol import (
    ABSENT,
    Delete,
    Expect,
    LeaseGoneError,
    Listing,
    Put,
    StoreChange,
    StoreEntry,
    TxnStore,
    Write,
    difference,
    note,
)

_LEASE = struct.Struct("<Qdd")
HEADER_BYTES = 64
MAX_LEASES = 256
# A process that was stopped while it held the lock is waited for so long.
LOCK_S = 1.0
_PAUSE_S = 0.001
# A write that meets another process's lock waits for so long, and then fails.
BUSY_TIMEOUT_S = 2.0
# No call is served before the store is open, so opening may wait for longer.
OPEN_TIMEOUT_S = 10.0
BUSY_PAUSE_S = 0.01
POLL_S = 0.1
KEPT_REVISIONS = 1_024
SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,
  lease INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leased ON entries (lease) WHERE lease != 0;
CREATE TABLE IF NOT EXISTS counter (
  one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL,
  compacted INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS changes (
  revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB, PRIMARY KEY (revision, key)
) WITHOUT ROWID;
INSERT OR IGNORE INTO counter VALUES (1, 0, 0);
"""
_UPSERT = """
INSERT INTO entries VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE
SET value = excluded.value, revision = excluded.revision, lease = excluded.lease
"""


def boot_id() -> str:
    """Return the kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class LeaseFile:
    """File of leases shared by the processes of one machine.

    A lease that expired never lives again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The file's lock keeps other processes out, not other threads of this one.
        self._threads = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        header = boot_id().encode().ljust(HEADER_BYTES, b"\0")
        with self._locked():
            if os.pread(self._file, HEADER_BYTES, 0) != header:
                # All room at once: later writes are in place and need none.
                os.pwrite(self._file, header + bytes(_LEASE.size * MAX_LEASES), 0)

    def grant(self, ttl_s: float) -> int:
        """Return the id of a new lease that lives for `ttl_s` from now.

        Raises UnavailableError if full.
        """
        lease = secrets.randbits(62) | 1
        with self._locked():
            now_s = boot_clock_s()
            for slot, (_, _, end_s) in self._slots():
                if end_s <= now_s:
                    self._write(slot, lease, ttl_s, now_s + ttl_s)
                    return lease
        raise UnavailableError(f"{self._path} holds {MAX_LEASES} live leases; stop some schedulers")

    def keep(self, lease: int) -> float:
        """Renew the lease; return the seconds that it lives from now, 0 if it has ended."""
        with self._locked():
            now_s = boot_clock_s()
            for slot, (name, ttl_s, end_s) in self._slots():
                if name == lease and now_s < end_s:
                    self._write(slot, lease, ttl_s, now_s + ttl_s)
                    return ttl_s
        return 0.0

    def end(self, lease: int) -> None:
        """End the lease; do nothing if it has ended."""
        with self._locked():
            for slot, (name, _, _) in self._slots():
                if name == lease:
                    self._write(slot, 0, 0.0, 0.0)

    def over(self, leases: Iterable[int]) -> set[int]:
        """Return the leases that have ended, and make sure that none of them is renewed."""
        over = set(leases)
        with self._locked():
            now_s = boot_clock_s()
            for slot, (name, _, end_s) in self._slots():
                if name in over and now_s < end_s:
                    over.discard(name)
                elif name in over:
                    self._write(slot, 0, 0.0, 0.0)
        return over

    def close(self) -> None:
        os.close(self._file)

    def _slots(self) -> Iterator[tuple[int, tuple[int, float, float]]]:
        content = os.pread(self._file, _LEASE.size * MAX_LEASES, HEADER_BYTES)
        return enumerate(_LEASE.iter_unpack(content))

    def _write(self, slot: int, lease: int, ttl_s: float, end_s: float) -> None:
        at = HEADER_BYTES + slot * _LEASE.size
        os.pwrite(self._file, _LEASE.pack(lease, ttl_s, end_s), at)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock. Raises `UnavailableError` if it is not free within a second."""
        with self._threads:
            try:
                self._lock()
                try:
                    yield
                finally:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            except OSError as error:
                raise UnavailableError(
                    f"leases {self._path} do not answer ({error}); check the store's disk"
                ) from error

    def _lock(self) -> None:
        until_s = time.monotonic() + LOCK_S
        while not self._try_lock():
            if time.monotonic() >= until_s:
                raise UnavailableError(f"{self._path} is locked; is a scheduler stopped?")
            time.sleep(_PAUSE_S)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


T = TypeVar("T")


class SqliteStore(TxnStore):
    """Store in one SQLite file, shared by the processes of one machine.

    Raises `ConfigError` when the file cannot be opened or belongs to something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _keep_private(path)
            self._db = sqlite3.connect(
                path, timeout=OPEN_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._open_when_free()
            self._leases = LeaseFile(path.with_name(path.name + "-leases"))
        except (OSError, sqlite3.Error, UnavailableError) as error:
            raise ConfigError(
                f"store {path} cannot be opened ({error}); give --store a writable file of ROSE"
            ) from error
        self._thread = ThreadPoolExecutor(1, "rose-store")
        # Leases are renewed while a write waits for another process's lock.
        self._lease_thread = ThreadPoolExecutor(1, "rose-leases")
        self._closed = False

    def _open_when_free(self) -> None:
        # SQLite refuses one of two processes that create a file at the same time, whatever the
        # timeout, since they would wait for each other for ever.
        until_s = time.monotonic() + OPEN_TIMEOUT_S
        while True:
            try:
                return self._open()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() >= until_s:
                    raise
            time.sleep(BUSY_PAUSE_S)

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        # An epoch that was handed out must survive a power cut, so every commit is synced.
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise sqlite3.DatabaseError(
                    f"schema {version}, this version reads {SCHEMA_VERSION}"
                )
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._db.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1e3)}")

    # ---- entries ----

    async def get(self, key: str) -> StoreEntry | None:
        return await self._ask(lambda: self._get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._ask(lambda: self._list(prefix))

    @override
    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        return await self._ask(lambda: self._txn(expect, writes))

    async def watch(self, since: Listing) -> AsyncGenerator[StoreChange, None]:
        known = {entry.key: entry.revision for entry in since.entries}
        seen = since.revision
        while True:
            try:
                changes, seen = await self._ask(
                    lambda: self._changes(since.prefix, seen, known)  # noqa: B023 - run at once
                )
            except UnavailableError:
                if self._closed:
                    raise
                changes = []
            for change in changes:
                note(known, change)
                yield change
            await asyncio.sleep(POLL_S)

    async def compact(self, revision: int) -> None:
        """Delete the history up to a revision, which watches then cannot replay."""

        def forget() -> None:
            with self._transaction():
                self._forget(revision)

        await self._ask(forget)

    # ---- leases ----

    async def grant_lease(self, ttl_s: float) -> int:
        return await self._ask_leases(lambda: self._leases.grant(ttl_s))

    async def keep_lease(self, lease: int) -> float:
        """Renew the lease without the database's lock or disk space; return seconds left."""
        return await self._ask_leases(lambda: self._leases.keep(lease))

    async def revoke_lease(self, lease: int) -> None:
        """End the lease; its keys count as deleted from then on."""
        await self._ask_leases(lambda: self._leases.end(lease))

    async def close(self) -> None:
        """Wait for calls under way, then close the files."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        for thread in (self._thread, self._lease_thread):
            thread.shutdown(wait=True, cancel_futures=True)
        self._db.close()
        self._leases.close()

    # ---- in the threads ----

    async def _ask(self, what: Callable[[], T]) -> T:
        def work() -> T:
            with self._reached():
                return what()

        return await self._in(self._thread, work)

    async def _ask_leases(self, what: Callable[[], T]) -> T:
        return await self._in(self._lease_thread, what)

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._closed:
            raise UnavailableError(f"store {self._path} is closed")
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def _get(self, key: str) -> StoreEntry | None:
        self._end_dead_leases()
        row = self._db.execute(
            "SELECT key, value, revision FROM entries WHERE key = ?", (key,)
        ).fetchone()
        return StoreEntry(*row) if row else None

    def _list(self, prefix: str) -> Listing:
        self._end_dead_leases()
        with self._transaction("DEFERRED"):
            return self._listing(prefix)

    def _listing(self, prefix: str) -> Listing:
        revision, _ = self._revisions()
        rows = self._db.execute(
            "SELECT key, value, revision FROM entries WHERE substr(key, 1, ?) = ? ORDER BY key",
            (len(prefix), prefix),
        ).fetchall()
        return Listing(prefix, tuple(StoreEntry(*row) for row in rows), revision)

    def _changes(
        self, prefix: str, seen: int, known: dict[str, int]
    ) -> tuple[Sequence[StoreChange], int]:
        """Return the changes after revision `seen`, and the revision that they lead to."""
        self._end_dead_leases()
        with self._transaction("DEFERRED"):
            revision, compacted = self._revisions()
            if seen < compacted:
                listing = self._listing(prefix)
                return difference(known, listing), listing.revision
            rows = self._db.execute(
                "SELECT key, value, revision FROM changes WHERE revision > ?"
                " AND substr(key, 1, ?) = ? ORDER BY revision, key",
                (seen, len(prefix), prefix),
            ).fetchall()
        return [StoreChange(*row) for row in rows], revision

    def _txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        with self._transaction():
            self._delete_of_dead_leases()
            if any(self._revision_of(each.key) != each.revision for each in expect):
                return None
            leases = {each.lease for each in writes if isinstance(each, Put) and each.lease}
            if over := self._leases.over(leases):
                raise LeaseGoneError(f"lease {over.pop():x} is over; take another one")
            return self._write(writes)

    def _write(self, writes: Sequence[Write]) -> int:
        done = [each for each in writes if isinstance(each, Put) or self._revision_of(each.key)]
        before, _ = self._revisions()
        if not done:
            return before
        revision = before + 1
        self._db.execute("UPDATE counter SET revision = ?", (revision,))
        for each in done:
            value = bytes(each.value) if isinstance(each, Put) else None
            if isinstance(each, Put):
                self._db.execute(_UPSERT, (each.key, value, revision, each.lease))
            else:
                self._db.execute("DELETE FROM entries WHERE key = ?", (each.key,))
            self._db.execute("INSERT INTO changes VALUES (?, ?, ?)", (revision, each.key, value))
        if revision % (KEPT_REVISIONS // 8) == 0:
            self._forget(revision - KEPT_REVISIONS)
        return revision

    def _forget(self, revision: int) -> None:
        self._db.execute("DELETE FROM changes WHERE revision <= ?", (revision,))
        self._db.execute("UPDATE counter SET compacted = max(compacted, ?)", (revision,))

    def _revision_of(self, key: str) -> int:
        row = self._db.execute("SELECT revision FROM entries WHERE key = ?", (key,)).fetchone()
        return row[0] if row else ABSENT

    def _revisions(self) -> tuple[int, int]:
        revision, compacted = self._db.execute("SELECT revision, compacted FROM counter").fetchone()
        return revision, compacted

    def _end_dead_leases(self) -> None:
        """Delete the keys whose lease has ended, before a read."""
        if self._dead_keys():
            with self._transaction():
                self._delete_of_dead_leases()

    def _delete_of_dead_leases(self) -> None:
        if dead := self._dead_keys():
            self._write([Delete(key) for key in dead])

    def _dead_keys(self) -> Sequence[str]:
        rows = self._db.execute("SELECT key, lease FROM entries WHERE lease != 0").fetchall()
        over = self._leases.over({lease for _, lease in rows}) if rows else set()
        return [key for key, lease in rows if lease in over]

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UnavailableError(
                f"store {self._path} does not answer ({error}); check its disk and its owner"
            ) from error

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        # IMMEDIATE: the comparison and the write see the same state in all processes.
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def _keep_private(path: Path) -> None:
    """Create the file, or set its mode, so that its owner alone can read and write it.

    SQLite gives the files beside it the same mode.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        # By its path: closing a descriptor would give up the locks of a store that is open here.
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o600)

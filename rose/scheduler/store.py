"""Store of control state: its interface, and the default, one SQLite file.

The file is written ahead (WAL) and synced on each commit.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rose.errors import ConfigError, UnavailableError

ABSENT = 0  # the revision of a key that is not there: compare_and_swap(key, ABSENT, …) creates it


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A value and the revision of the write that put it there (>= 1, grows with each write)."""

    key: str
    value: bytes
    revision: int


class Store(Protocol):
    """Durable map from str to bytes. A write that has returned survives the process.

    Revisions come from one counter of the whole store, so a deleted and recreated key never
    carries an old revision again. All methods raise `UnavailableError` when the store is gone.
    """

    def get(self, key: str) -> StoreEntry | None:
        """The entry of the key, None when there is none."""
        ...

    def put(self, key: str, value: bytes) -> int:
        """Write whatever is there now; returns the new revision."""
        ...

    def compare_and_swap(self, key: str, expected_revision: int, value: bytes) -> int | None:
        """Write only over `expected_revision` (`ABSENT`: only if missing).

        Returns the new revision, None when somebody else wrote in between.
        """
        ...

    def list(self, prefix: str) -> "list[StoreEntry]":
        """All entries whose key starts with the prefix, in the order of their keys."""
        ...

    def delete(self, key: str) -> bool:
        """Remove the key; False when it was not there."""
        ...

    def close(self) -> None:
        """Let go of files and connections; using the store afterwards is an error."""
        ...


# A write that meets somebody's lock waits for so long, and then says so.
BUSY_TIMEOUT_S = 2.0
# Nobody is served before the store is open, so that may wait for longer.
OPEN_TIMEOUT_S = 10.0
SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counter (
  one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL
);
INSERT OR IGNORE INTO counter VALUES (1, 0);
"""
_UPSERT = """
INSERT INTO entries VALUES (?, ?, ?)
ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision
"""


class SqliteStore:
    """The store's contract on a file; several processes may share it, and threads take turns.

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
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"store {path} cannot be opened ({error}); give --store a writable file of ROSE"
            ) from error

    def _open(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise sqlite3.DatabaseError(f"schema {version}, this version reads {SCHEMA_VERSION}")
        self._db.execute("PRAGMA journal_mode = WAL")
        # An epoch that was handed out must survive a power cut, so every commit is synced.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self._db.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1e3)}")

    def get(self, key: str) -> StoreEntry | None:
        with self._reached():
            row = self._db.execute(
                "SELECT key, value, revision FROM entries WHERE key = ?", (key,)
            ).fetchone()
        return StoreEntry(*row) if row else None

    def put(self, key: str, value: bytes) -> int:
        with self._transaction():
            return self._write(key, value)

    def compare_and_swap(self, key: str, expected_revision: int, value: bytes) -> int | None:
        """Write only over `expected_revision`; None when somebody else wrote in between."""
        with self._transaction():
            entry = self.get(key)
            if (entry.revision if entry else ABSENT) != expected_revision:
                return None
            return self._write(key, value)

    def list(self, prefix: str) -> "list[StoreEntry]":
        with self._reached():
            rows = self._db.execute(
                "SELECT key, value, revision FROM entries WHERE substr(key, 1, ?) = ? ORDER BY key",
                (len(prefix), prefix),
            ).fetchall()
        return [StoreEntry(*row) for row in rows]

    def delete(self, key: str) -> bool:
        with self._transaction():
            return self._db.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount > 0

    def close(self) -> None:
        self._db.close()

    def _write(self, key: str, value: bytes) -> int:
        self._db.execute("UPDATE counter SET revision = revision + 1")
        revision: int = self._db.execute("SELECT revision FROM counter").fetchone()[0]
        self._db.execute(_UPSERT, (key, bytes(value), revision))
        return revision

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UnavailableError(
                f"store {self._path} does not answer ({error}); check its disk and its owner"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._reached():
            # IMMEDIATE: the comparison and the write see the same state in all processes.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _keep_private(path: Path) -> None:
    """Make the file this user's alone before SQLite does; its files beside it get the same mode."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        # By its path: closing a descriptor would give up the locks of a store that is open here.
        if path.stat().st_uid == os.geteuid():
            path.chmod(0o600)

"""Promises of a store in a file beyond the contract: restarts, neighbours, locks, old files."""

import asyncio
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from rose.errors import ConfigError, UnavailableError
from rose.store import SqliteStore
from rose.store.sqlite import HEADER_BYTES, LeaseFile


async def test_everything_is_kept_across_a_restart(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "s.sqlite")
    revision = await first.put("a", b"1")
    await first.close()
    second = SqliteStore(tmp_path / "s.sqlite")
    entry = await second.get("a")
    assert entry is not None
    assert entry.revision == revision
    assert await second.put("b", b"2") > revision
    await second.close()


async def test_two_processes_on_one_file_see_each_others_writes_and_leases(tmp_path: Path) -> None:
    one, other = SqliteStore(tmp_path / "s.sqlite"), SqliteStore(tmp_path / "s.sqlite")
    revision = await one.put("a", b"1")
    assert await other.compare_and_swap("a", revision, b"2") is not None
    assert await one.compare_and_swap("a", revision, b"3") is None
    lease = await one.grant_lease(60)
    await one.put("leased", b"1", lease)
    assert await other.keep_lease(lease) == 60
    await other.revoke_lease(lease)
    assert await one.get("leased") is None
    await one.close()
    await other.close()


async def test_two_that_open_a_new_file_at_once_both_get_it(tmp_path: Path) -> None:
    for number in range(20):
        path, together = tmp_path / f"{number}.sqlite", threading.Barrier(2)

        def opened(path: Path = path, together: threading.Barrier = together) -> SqliteStore:
            together.wait()
            return SqliteStore(path)

        for store in await asyncio.gather(*(asyncio.to_thread(opened) for _ in range(2))):
            await store.close()


async def test_a_lease_is_kept_while_another_program_locks_the_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    lease = await store.grant_lease(60)
    other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert await store.keep_lease(lease) == 60
    other.execute("ROLLBACK")
    other.close()
    await store.close()


def test_no_lease_outlives_its_boot(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    before = LeaseFile(path)
    lease = before.grant(60)
    before.close()
    same = LeaseFile(path)
    assert same.keep(lease) == 60
    same.close()
    with path.open("r+b") as file:
        file.write(b"another boot".ljust(HEADER_BYTES, b"\0"))
    after = LeaseFile(path)
    assert after.keep(lease) == 0
    assert after.over({lease}) == {lease}
    after.close()


@pytest.mark.parametrize("version", [1, 3])
def test_a_file_of_another_schema_is_refused_with_one_line(tmp_path: Path, version: int) -> None:
    path = tmp_path / "s.sqlite"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute(f"PRAGMA user_version = {version}")
    other.close()
    with pytest.raises(ConfigError, match=f"schema {version}, this version reads 2"):
        SqliteStore(path)


def test_a_foreign_file_is_refused_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    with pytest.raises(ConfigError, match="--store"):
        SqliteStore(path)


async def test_a_closed_store_is_unavailable(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    await store.close()
    with pytest.raises(UnavailableError):
        await store.get("a")


@pytest.mark.parametrize("before", [None, 0o644], ids=["new", "of a life before"])
async def test_a_file_of_the_store_is_its_users_alone(tmp_path: Path, before: int | None) -> None:
    path, mask = tmp_path / "s.sqlite", os.umask(0o022)
    try:
        if before is not None:
            path.touch(before)
        store = SqliteStore(path)
        await store.put("a", b"1")
        modes = _modes(tmp_path)
        await store.close()
    finally:
        os.umask(mask)
    names = ("s.sqlite", "s.sqlite-wal", "s.sqlite-shm", "s.sqlite-leases")
    assert modes == dict.fromkeys(names, 0o600)


def _modes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}


async def test_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    """SQLite syncs by itself, where no test sees it: what it was asked for is looked at."""
    store = SqliteStore(tmp_path / "s.sqlite")
    full = 2
    assert store._db.execute("PRAGMA synchronous").fetchone() == (full,)
    await store.close()

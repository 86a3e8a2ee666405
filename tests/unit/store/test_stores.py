"""Stores: one contract of all, a file's own promises, and the names of both."""

import asyncio
import itertools
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError, UnavailableError
from rose.store import (
    ABSENT,
    Delete,
    EtcdAccess,
    EtcdStore,
    Expect,
    LeaseGoneError,
    Put,
    SqliteStore,
    Store,
    StoreChange,
)
from rose.store.opening import StoreName
from rose.store.sqlite import HEADER_BYTES, LeaseFile
from tests.fakes.memory_store import InMemoryStore
from tests.harness.programs.etcd_cluster import needs_etcd, running_etcd
from tests.harness.waiting import PATIENCE_S

PREFIXES = (f"t{number}/" for number in itertools.count())
# etcd counts whole seconds.
TTL_S = 1.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdAccess]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.access()


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=needs_etcd)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    made: InMemoryStore | SqliteStore | EtcdStore
    if request.param == "memory":
        made = InMemoryStore()
    elif request.param == "sqlite":
        made = SqliteStore(tmp_path / "store.sqlite")
    else:
        endpoints = request.getfixturevalue("etcd").endpoints
        made = EtcdStore(EtcdAccess(endpoints, next(PREFIXES)))
    yield made
    await made.close()


class TestStoreContract:
    async def test_a_missing_key_is_none_and_its_deletion_writes_nothing(
        self, store: Store
    ) -> None:
        before = (await store.list("")).revision
        assert await store.get("a") is None
        assert await store.delete("a") == before

    async def test_put_is_read_back_with_its_revision(self, store: Store) -> None:
        revision = await store.put("a", b"\x00one")
        entry = await store.get("a")
        assert entry is not None
        assert (entry.key, entry.value, entry.revision) == ("a", b"\x00one", revision)

    async def test_revisions_grow_over_all_keys_and_deletions(self, store: Store) -> None:
        first = await store.put("a", b"1")
        second = await store.put("b", b"1")
        third = await store.delete("a")
        fourth = await store.put("a", b"1")
        assert ABSENT < first < second < third < fourth

    async def test_swap_writes_only_over_the_expected_revision(self, store: Store) -> None:
        first = await store.put("a", b"1")
        second = await store.compare_and_swap("a", first, b"2")
        assert second is not None
        assert await store.compare_and_swap("a", first, b"3") is None
        entry = await store.get("a")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"2", second)

    async def test_swap_creates_only_what_is_absent(self, store: Store) -> None:
        assert await store.compare_and_swap("a", ABSENT, b"1") is not None
        assert await store.compare_and_swap("a", ABSENT, b"2") is None
        assert await store.compare_and_swap("b", 7, b"2") is None
        assert await store.get("b") is None

    async def test_list_is_sorted_and_takes_the_prefix_literally(self, store: Store) -> None:
        for key in ("b", "a/2", "a/1", "a%", "A/3"):
            last = await store.put(key, key.encode())
        listing = await store.list("a/")
        assert [entry.key for entry in listing.entries] == ["a/1", "a/2"]
        assert listing.revision == last
        assert [entry.key for entry in (await store.list("a%")).entries] == ["a%"]
        assert len((await store.list("")).entries) == 5

    async def test_a_transaction_is_all_or_nothing_at_one_revision(self, store: Store) -> None:
        old = await store.put("gone", b"1")
        expect = [Expect("gone", old), Expect("new", ABSENT)]
        writes = [Put("new", b"1"), Put("other", b"2"), Delete("gone")]
        revision = await store.txn(expect, writes)
        assert revision is not None
        found = (await store.list("")).entries
        assert [(entry.key, entry.revision) for entry in found] == [
            ("new", revision),
            ("other", revision),
        ]
        assert await store.txn(expect, [Put("late", b"1")]) is None
        assert await store.get("late") is None

    async def test_of_many_swaps_of_one_revision_one_succeeds(self, store: Store) -> None:
        tries = (store.compare_and_swap("a", ABSENT, str(n).encode()) for n in range(8))
        done = [each for each in await asyncio.gather(*tries) if each is not None]
        assert len(done) == 1

    async def test_a_key_ends_with_its_lease_and_that_is_a_revision(self, store: Store) -> None:
        lease = await store.grant_lease(TTL_S)
        written = await store.put("a", b"1", lease)
        assert await store.keep_lease(lease) > 0
        async with asyncio.timeout(PATIENCE_S):
            while await store.get("a") is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await store.list("")).revision > written
        assert await store.keep_lease(lease) == 0
        with pytest.raises(LeaseGoneError):
            await store.put("a", b"2", lease)

    async def test_a_revoked_lease_takes_its_keys_and_no_others(self, store: Store) -> None:
        lease = await store.grant_lease(60)
        await store.put("a", b"1", lease)
        await store.put("b", b"1", lease)
        await store.put("b", b"2")  # written anew without it
        await store.put("c", b"1")
        await store.revoke_lease(lease)
        await store.revoke_lease(lease)
        assert [entry.key for entry in (await store.list("")).entries] == ["b", "c"]
        assert await store.keep_lease(lease) == 0

    async def test_a_watch_yields_each_change_after_its_listing_once(self, store: Store) -> None:
        await store.put("w/a", b"0")
        since = await store.list("w/")
        first = await store.put("w/a", b"1")
        await store.put("other", b"1")
        watch = store.watch(since)
        assert await _next(watch) == StoreChange("w/a", b"1", first)
        second = await store.txn((), [Put("w/b", b"2"), Delete("w/a")])
        both = [await _next(watch), await _next(watch)]
        assert sorted(both, key=lambda each: each.key) == [
            StoreChange("w/a", None, second or 0),
            StoreChange("w/b", b"2", second or 0),
        ]
        lease = await store.grant_lease(TTL_S)
        third = await store.put("w/c", b"3", lease)
        assert await _next(watch) == StoreChange("w/c", b"3", third)
        ended = await _next(watch)
        assert (ended.key, ended.value) == ("w/c", None)
        assert ended.revision > third
        await watch.aclose()  # type: ignore[attr-defined]

    async def test_a_watch_from_before_a_compaction_yields_the_difference(self, store: Any) -> None:
        for key in ("w/gone", "w/kept", "w/changed"):
            await store.put(key, b"0")
        since = await store.list("w/")
        await store.delete("w/gone")
        await store.put("w/changed", b"1")
        changed = await store.put("w/changed", b"2")
        await store.put("w/passing", b"1")
        await store.delete("w/passing")
        last = await store.put("w/new", b"3")
        await store.compact(last)
        watch = store.watch(since)
        found = [await _next(watch) for _ in range(3)]
        assert found[0] == StoreChange("w/changed", b"2", changed)
        assert sorted(found[1:], key=lambda each: each.key) == [
            StoreChange("w/gone", None, last),
            StoreChange("w/new", b"3", last),
        ]
        after = await store.put("w/after", b"4")
        assert await _next(watch) == StoreChange("w/after", b"4", after)
        await watch.aclose()


async def _next(watch: AsyncIterator[StoreChange]) -> StoreChange:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(watch)


# ---- files ----


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


# ---- names ----


ETCD = "etcd://h:2379"
SPELLINGS = {
    ETCD: ETCD,
    "ETCD://h:2379": ETCD,
    " etcd://h:2379\n": ETCD,
    "Etcd://h:2379/P": f"{ETCD}/P",
    "etcd://[::1]:2379": "etcd://[::1]:2379",
    "run/s.sqlite": "run/s.sqlite",
    "./a:b": "./a:b",
    "a:b.sqlite": "a:b.sqlite",
}


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_store_is_the_same_in_every_spelling(spelled: str) -> None:
    assert StoreName(spelled).name == SPELLINGS[spelled]


OTHERS = [
    "etcds://h:2379",
    "https://h:2379",
    "postgres://u:pw@h/d",
    "etcd:/h:2379",
    "file:///s",
    "etcd:h:1",
    ":memory:",
    "~/s.sqlite",
]


@pytest.mark.parametrize("spelled", [*OTHERS, " ", ""])
def test_a_store_of_another_kind_is_refused_and_makes_no_file(spelled: str) -> None:
    with pytest.raises(ConfigError, match="etcd://HOST:PORT") as refused:
        StoreName(spelled)
    assert "pw" not in str(refused.value)

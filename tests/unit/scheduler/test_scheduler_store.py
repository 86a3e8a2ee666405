"""Every store keeps the same promises."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.errors import ConfigError, UnavailableError
from rose.scheduler.store import ABSENT, SqliteStore, Store
from tests.fakes.memory_store import InMemoryStore

IMPLEMENTATIONS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: InMemoryStore(),
    "sqlite": lambda folder: SqliteStore(folder / "store.sqlite"),
}


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = IMPLEMENTATIONS[request.param](tmp_path)
    yield made
    made.close()


def test_missing_key_is_none(store: Store) -> None:
    assert store.get("a") is None
    assert store.delete("a") is False


def test_put_is_read_back_with_its_revision(store: Store) -> None:
    revision = store.put("a", b"\x00one")
    entry = store.get("a")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("a", b"\x00one", revision)


def test_revisions_grow_over_all_keys_and_deletes(store: Store) -> None:
    first = store.put("a", b"1")
    second = store.put("b", b"1")
    store.delete("a")
    third = store.put("a", b"1")
    assert ABSENT < first < second < third


def test_swap_writes_only_over_the_expected_revision(store: Store) -> None:
    first = store.put("a", b"1")
    second = store.compare_and_swap("a", first, b"2")
    assert second is not None
    assert store.compare_and_swap("a", first, b"3") is None
    entry = store.get("a")
    assert entry is not None
    assert (entry.value, entry.revision) == (b"2", second)


def test_swap_creates_only_what_is_absent(store: Store) -> None:
    assert store.compare_and_swap("a", ABSENT, b"1") is not None
    assert store.compare_and_swap("a", ABSENT, b"2") is None
    assert store.compare_and_swap("b", 7, b"2") is None
    assert store.get("b") is None


def test_list_is_sorted_and_takes_the_prefix_literally(store: Store) -> None:
    for key in ("b", "a/2", "a/1", "a%", "A/3"):
        store.put(key, key.encode())
    assert [entry.key for entry in store.list("a/")] == ["a/1", "a/2"]
    assert [entry.key for entry in store.list("a%")] == ["a%"]
    assert len(store.list("")) == 5


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "swap", "stale", "delete"]), st.sampled_from("ab"), st.binary()
        ),
        max_size=20,
    )
)
def test_stores_agree_on_every_history(
    tmp_path: Path, history: list[tuple[str, str, bytes]]
) -> None:
    memory, sqlite = InMemoryStore(), SqliteStore(tmp_path / "fresh.sqlite")
    for entry in sqlite.list(""):
        sqlite.delete(entry.key)
    for operation, key, value in history:
        for each in (memory, sqlite):
            entry = each.get(key)
            revision = entry.revision if entry else ABSENT
            if operation == "put":
                each.put(key, value)
            elif operation == "delete":
                each.delete(key)
            else:
                done = each.compare_and_swap(key, revision + (operation == "stale"), value)
                assert (done is None) == (operation == "stale")
    assert [(e.key, e.value) for e in memory.list("")] == [
        (e.key, e.value) for e in sqlite.list("")
    ]
    sqlite.close()


def test_sqlite_keeps_everything_across_a_restart(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "s.sqlite")
    revision = first.put("a", b"1")
    first.close()
    second = SqliteStore(tmp_path / "s.sqlite")
    entry = second.get("a")
    assert entry is not None
    assert entry.revision == revision
    assert second.put("b", b"2") > revision
    second.close()


def test_two_processes_on_one_file_see_each_other(tmp_path: Path) -> None:
    one, other = SqliteStore(tmp_path / "s.sqlite"), SqliteStore(tmp_path / "s.sqlite")
    revision = one.put("a", b"1")
    assert other.compare_and_swap("a", revision, b"2") is not None
    assert one.compare_and_swap("a", revision, b"3") is None
    one.close()
    other.close()


def test_a_foreign_file_is_refused_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    with pytest.raises(ConfigError, match="--store"):
        SqliteStore(path)


def test_a_closed_store_is_unavailable(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    store.close()
    with pytest.raises(UnavailableError):
        store.get("a")


@pytest.mark.parametrize("before", [None, 0o644], ids=["new", "of a life before"])
def test_a_file_of_the_store_is_its_users_alone(tmp_path: Path, before: int | None) -> None:
    path, mask = tmp_path / "s.sqlite", os.umask(0o022)
    try:
        if before is not None:
            path.touch(before)
        store = SqliteStore(path)
        store.put("a", b"1")
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(mask)
    assert modes == dict.fromkeys(("s.sqlite", "s.sqlite-wal", "s.sqlite-shm"), 0o600)

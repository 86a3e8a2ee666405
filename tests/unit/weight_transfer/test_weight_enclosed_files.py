"""Files named by a caller: read below one folder, whole, bounded, and never waited for."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from weight_transfer.apply.replica_weights import Enclosed, ReplicaWeights
from weight_transfer.apply.staging import Staging
from weight_transfer.errors import ChunkMissingError, StoreError

LIMIT = 64
PATIENCE_S = 5.0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "run" / "weights"
    (store / "manifests").mkdir(parents=True)
    (store / "manifests" / "1.json").write_bytes(b"sound")
    (store / "manifests" / "full").write_bytes(b"x" * LIMIT)
    (store / "manifests" / "large").write_bytes(b"x" * (LIMIT + 1))
    (tmp_path / "run" / "secret").write_bytes(b"not yours")
    os.mkfifo(store / "manifests" / "fifo")
    (store / "manifests" / "link").symlink_to(tmp_path / "run" / "secret")
    (store / "manifests" / "inner").symlink_to(store / "manifests" / "1.json")
    (store / "out").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "weights-of-another").mkdir()
    (tmp_path / "run" / "weights-of-another" / "f").write_bytes(b"not yours")
    return store


def read(root: Path | None, path: Path) -> bytes:
    """In a thread: what waits for ever is to fail, not to hang."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(Enclosed(root).read, path, LIMIT).result(PATIENCE_S)
    finally:
        pool.shutdown(wait=False)


@pytest.mark.parametrize("name", ["1.json", "full"])
def test_a_file_of_the_store_is_read(
    store: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (store / "manifests" / name).read_bytes()
    assert read(store, store / "manifests" / name) == expected
    assert read(None, store / "manifests" / name) == expected
    monkeypatch.chdir(store.parent)
    assert read(Path("weights"), Path("weights/manifests") / name) == expected
    assert read(store, store / "manifests" / ".." / "manifests" / name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "manifests/fifo",
        "manifests/large",
        "manifests/link",
        "manifests/inner",
        "manifests",
        ".",
        "out/secret",
        "../secret",
        "manifests/../../secret",
        "../weights-of-another/f",
        "/dev/zero",
        "/etc/passwd",
        "manifests/a\0b",
        "manifests/\udcff\ud800",
        "n" * 5_000,
    ],
)
def test_nothing_else_is_read_or_waited_for(store: Path, name: str) -> None:
    with pytest.raises(StoreError):
        read(store, store / name)


@pytest.mark.parametrize("name", ["manifests/fifo", "manifests/large", "/dev/zero"])
def test_a_caller_that_may_name_any_file_names_regular_ones(store: Path, name: str) -> None:
    with pytest.raises(StoreError):
        read(None, store / name)


def test_what_is_not_there_is_to_be_fetched(store: Path) -> None:
    with pytest.raises(ChunkMissingError, match="fetch it"):
        read(store, store / "manifests" / "2.json")


def test_an_update_that_is_still_read_does_not_hold_the_engine_up(store: Path) -> None:
    go_on = threading.Event()

    def slow() -> Any:
        go_on.wait(PATIENCE_S)
        raise StoreError("never mind")

    weights = ReplicaWeights.__new__(ReplicaWeights)
    weights._staging = Staging(slow, lambda _: iter(()))  # type: ignore[arg-type, return-value]
    with pytest.raises(StoreError, match="still being read"):
        weights.decode([store / "manifests" / "1.json"], store, "another")
    go_on.set()

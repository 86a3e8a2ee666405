"""Fetching weights stays within what the operator allows: link, disk, CPU."""

import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.weight_distribution import VersionServer
from weight_transfer import (
    ChunkStore,
    Manifest,
    SigningKey,
    StoredFile,
    TensorBits,
    VersionPublisher,
)
from weight_transfer.errors import CacheFullError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, fetch_version
from weight_transfer.fetch.limits import ChunkCache, TokenBucket, evictions

ELEMENTS = 64_000


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.floats(0, 2)), min_size=1, max_size=50),
    st.integers(100, 10_000),
    st.integers(1, 4_000),
)
def test_no_more_than_rate_times_time_and_one_burst_passes(
    pieces: list[tuple[int, float]], rate: int, burst: int
) -> None:
    bucket, now_s, passed = TokenBucket(rate, burst), 0.0, 0
    for size, pause_s in pieces:
        now_s += bucket.take(size, now_s)
        passed += size
        assert passed <= rate * now_s + burst + 1e-6 * passed
        now_s += pause_s


@given(
    st.lists(st.integers(1, 100), max_size=30),
    st.sets(st.integers(0, 29)),
    st.integers(0, 1_500),
)
def test_the_oldest_go_first_and_never_what_is_needed(
    sizes: list[int], needed: set[int], room: int
) -> None:
    files = [StoredFile(str(n), Path(str(n)), size, n) for n, size in enumerate(sizes)]
    names = {str(n) for n in needed}
    leaving = evictions(files, names, room)
    assert not names & {file.name for file in leaving}
    staying = [file for file in files if file not in leaving]
    free = [file for file in staying if file.name not in names]
    if sum(file.size for file in staying) > room:
        assert free == [], "only what is needed may be too much"
    if leaving and free:
        assert max(f.written_ns for f in leaving) < min(f.written_ns for f in free)
    if leaving:
        assert sum(file.size for file in staying) + leaving[-1].size > room, "not one too many"


class Trainer:
    """Publishes versions of one tensor over HTTP."""

    def __init__(self, root: Path, port: int) -> None:
        self.key = SigningKey.generate()
        self.store = ChunkStore(root)
        self.publisher = VersionPublisher(
            self.store, "job", "trainer", self.key, chunk_bytes=16_384
        )
        self.server = VersionServer(self.store, port)
        self.manifests: list[Manifest] = []

    def publish(self) -> Manifest:
        version = len(self.manifests) + 1
        old, new = (self._tensors(v) for v in (version - 1, version))
        self.manifests.append(self.publisher.publish(version, version - 1, old, new))
        return self.manifests[-1]

    def _tensors(self, seed: int) -> dict[str, TensorBits]:
        bits = np.random.default_rng(seed).integers(0, 1 << 16, ELEMENTS, dtype=np.uint16)
        return {"w": TensorBits("w", "bfloat16", (64, ELEMENTS // 64), bits)}


async def fetch(trainer: Trainer, receiving: DownloadLimits, version: int, hold: set[str]) -> float:
    """Seconds that it took."""
    began_s = time.monotonic()
    async with aiohttp.ClientSession() as session:
        await fetch_version(
            *(
                ChunkFetcher(session, receiving),
                trainer.server.url,
                "job",
                version,
                trainer.key.verify_key,
            ),
            on_reject=lambda _: None,
            hold=hold,
        )
    return time.monotonic() - began_s


@pytest.fixture
async def trainer(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Trainer]:
    trainer = Trainer(tmp_path / "from", unused_tcp_port)
    await trainer.server.start()
    yield trainer
    await trainer.server.close()


async def test_the_link_is_used_no_faster_than_allowed(trainer: Trainer, tmp_path: Path) -> None:
    size = trainer.publish().wire_bytes
    rate = size // 2
    capped = DownloadLimits(ChunkStore(tmp_path / "capped"), Caps(bytes_per_s=rate))
    took_s = await fetch(trainer, capped, 1, set())
    allowed_burst = max(rate * 0.1, 64 << 10)
    assert took_s >= (size - allowed_burst) / rate * 0.9
    free = DownloadLimits(ChunkStore(tmp_path / "free"), Caps())
    assert await fetch(trainer, free, 1, set()) < took_s


async def test_the_store_stays_within_its_cap_and_keeps_what_is_in_use(
    trainer: Trainer, tmp_path: Path
) -> None:
    size = max(trainer.publish().wire_bytes for _ in range(5))
    store = ChunkStore(tmp_path / "to")
    cap = int(2.5 * size)
    receiving = DownloadLimits(store, Caps(disk_bytes=cap))
    with receiving.cache.hold() as kept:
        await fetch(trainer, receiving, 1, kept)
        for version in range(2, 6):
            with receiving.cache.hold() as hold:
                await fetch(trainer, receiving, version, hold)
                assert all(store.has(ref.id) for ref in trainer.manifests[version - 1].chunks)
            assert sum(file.size for file in store.files()) <= cap
        assert all(store.has(ref.id) for ref in trainer.manifests[0].chunks), "held all the time"
    assert not any(store.has(ref.id) for ref in trainer.manifests[1].chunks), "the oldest went"
    await fetch(trainer, receiving, 2, set())


async def test_a_version_that_cannot_fit_is_refused_before_it_is_fetched(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.publish()
    store = ChunkStore(tmp_path / "to")
    receiving = DownloadLimits(store, Caps(disk_bytes=1_000))
    with pytest.raises(CacheFullError, match=r"receiver\.disk_bytes"):
        await fetch(trainer, receiving, 1, set())
    assert store.files() == []


def test_a_hold_ends_with_its_block(tmp_path: Path) -> None:
    cache = ChunkCache(ChunkStore(tmp_path), 1)
    with cache.hold() as first, cache.hold() as second:
        first.add("a")
        second.add("a")
    assert not cache._holds


async def test_what_arrives_is_worked_on_by_nice_threads(tmp_path: Path) -> None:
    receiving = DownloadLimits(ChunkStore(tmp_path), Caps(threads=1, nice=15))
    name, niceness = await receiving.work(
        lambda: (
            threading.current_thread().name,
            os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
        )
    )
    assert name.startswith("rose-receiver")
    assert niceness == 15
    receiving.close()

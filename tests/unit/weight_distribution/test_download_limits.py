"""Fetching weights stays within what the operator allows: link, disk, CPU."""

import os
import threading
import time
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.addresses import free_port
from rose.weight_distribution import VersionServer
from tests.harness.weight_peers import fetched, publisher, serving
from weight_transfer import ChunkStore, Manifest, StoredFile, TensorBits
from weight_transfer.errors import CacheFullError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits
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


class LimitedReader:
    """A publisher of versions of one tensor, and a node that fetches them within `caps`."""

    def __init__(self, root: Path, caps: Caps) -> None:
        self.publisher = publisher(root / "from")
        self.server = VersionServer(ChunkStore(root / "from"), free_port())
        self.limits = DownloadLimits(ChunkStore(root / "to"), caps)
        self.manifests: list[Manifest] = []

    def publish(self) -> Manifest:
        version = len(self.manifests) + 1
        old, new = (self._tensors(v) for v in (version - 1, version))
        self.manifests.append(self.publisher.publish(version, version - 1, old, new))
        return self.manifests[-1]

    async def fetch(self, version: int, hold: set[str]) -> float:
        """Return the seconds that it took."""
        began_s = time.monotonic()
        async with aiohttp.ClientSession() as session:
            fetcher = ChunkFetcher(session, self.limits)
            await fetched(fetcher, self.server.url, version, hold=hold)
        return time.monotonic() - began_s

    def _tensors(self, seed: int) -> dict[str, TensorBits]:
        bits = np.random.default_rng(seed).integers(0, 1 << 16, ELEMENTS, dtype=np.uint16)
        return {"w": TensorBits("w", "bfloat16", (64, ELEMENTS // 64), bits)}


async def test_the_link_is_used_no_faster_than_allowed(tmp_path: Path) -> None:
    rate = 2 * ELEMENTS
    capped = LimitedReader(tmp_path / "capped", Caps(bytes_per_s=rate))
    free = LimitedReader(tmp_path / "free", Caps())
    async with serving(capped.server), serving(free.server):
        size = capped.publish().wire_bytes
        took_s = await capped.fetch(1, set())
        assert took_s >= (size - max(rate * 0.1, 64 << 10)) / rate * 0.9
        free.publish()
        assert await free.fetch(1, set()) < took_s


async def test_the_store_stays_within_its_cap_and_keeps_what_is_in_use(tmp_path: Path) -> None:
    cap = int(2.5 * 1.1 * 2 * ELEMENTS)
    reader = LimitedReader(tmp_path, Caps(disk_bytes=cap))
    store = reader.limits.store
    sizes = [reader.publish().wire_bytes for _ in range(5)]
    assert 2 * max(sizes) < cap < 3 * min(sizes)
    async with serving(reader.server):
        with reader.limits.cache.hold() as kept:
            await reader.fetch(1, kept)
            for version in range(2, 6):
                with reader.limits.cache.hold() as hold:
                    await reader.fetch(version, hold)
                    assert all(store.has(r.id) for r in reader.manifests[version - 1].chunks)
                assert sum(file.size for file in store.files()) <= cap
            assert all(store.has(r.id) for r in reader.manifests[0].chunks), "held all the time"
        gone = reader.manifests[1].chunks
        assert not any(store.has(ref.id) for ref in gone), "the oldest went"
        await reader.fetch(2, set())


async def test_a_version_that_cannot_fit_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    reader = LimitedReader(tmp_path, Caps(disk_bytes=1_000))
    reader.publish()
    async with serving(reader.server):
        with pytest.raises(CacheFullError, match=r"receiver\.disk_bytes"):
            await reader.fetch(1, set())
    assert reader.limits.store.files() == []


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

"""Publisher, relay or receiver dies at any chunk's boundary: all end bit-exact, once sent."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crash_cluster import CHUNK_BYTES, CHUNKS, KEY, Cluster, tensors

from weight_transfer import ChunkStore, VersionPublisher
from weight_transfer import serve as forwarding
from weight_transfer.fetch import download, fetcher

ROLES = ("publisher", "relay", "receiver")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "KNOWN_WITHIN_S", 0.3)
    monkeypatch.setattr(fetcher, "PARALLEL_CHUNKS", 1)
    monkeypatch.setattr(forwarding, "IN_LINE_S", 0.2)
    for module in (fetcher, download):
        monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.02)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("boundary", range(CHUNKS + 1))
async def test_whoever_dies_at_a_boundary_all_end_bit_exact(
    role: str,
    boundary: int,
    tmp_path: Path,
    unused_tcp_port_factory: Callable[[], int],
) -> None:
    cluster = Cluster(tmp_path, [unused_tcp_port_factory() for _ in range(4)])
    origin = cluster.origin
    await cluster.start()
    for member in cluster.members:
        member.fetch()
    await cluster.boundary(boundary)
    names = [ref.id for ref in origin.manifest.chunks]
    victim = cluster.relay_of(names[min(boundary, CHUNKS - 1)])
    if role == "receiver":
        victim = next(member for member in cluster.members if member is not victim)
    await (origin if role == "publisher" else victim).kill()
    sent = dict(origin.sent)
    survivors = [m for m in cluster.members if role == "publisher" or m is not victim]
    # A chunk that no survivor has whole: only the part that the next member has is left.
    torn = [n for n in names if not any(m.store.has(n) for m in survivors)]
    lost = {n: sent[n] - min(m.landed(n) for m in survivors) for n in torn}
    await asyncio.sleep(0.05)
    if role == "publisher":
        await origin.start()
    else:
        await victim.live(cluster.urls)
        victim.fetch()
    await asyncio.gather(*(member.done() for member in cluster.members))
    for ref in origin.manifest.chunks:
        assert origin.sent[ref.id] <= ref.encoded_bytes + lost.get(ref.id, 0), role
    for member in cluster.members:
        assert member.rejected == []
        assert np.array_equal(member.weights()["w"].bits, tensors(1)["w"].bits)
    await cluster.close()


@pytest.mark.parametrize("boundary", range(CHUNKS + 1))
def test_a_publisher_that_dies_while_it_writes_publishes_the_same_version_again(
    boundary: int, tmp_path: Path
) -> None:
    class DyingStore(ChunkStore):
        left = boundary

        def put(self, encoded: bytes) -> str:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return super().put(encoded)

        def put_manifest(self, manifest: object) -> Path:
            raise KeyboardInterrupt

    def publisher(store: ChunkStore) -> VersionPublisher:
        return VersionPublisher(store, "job", "trainer", KEY, chunk_bytes=CHUNK_BYTES)

    with pytest.raises(KeyboardInterrupt):
        publisher(DyingStore(tmp_path)).publish(1, 0, tensors(0), tensors(1))
    store = ChunkStore(tmp_path)
    assert store.versions() == (), "a version is there whole or not at all"
    kept = {path.name for path in store.chunks_dir.iterdir()}
    assert len(kept) == boundary
    manifest = publisher(store).publish(1, 0, tensors(0), tensors(1))
    assert kept <= {ref.id for ref in manifest.chunks}
    assert all(store.sound(ref.id) for ref in manifest.chunks)

"""Who joins at any version, with bases at any place, ends bit-exact; what readers need stays."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from rose.errors import RefusedError
from rose.node.bringing import Source, Wish, bring, rebased
from rose.node.chain import KnownVersion, VersionChain
from rose.publish import Caps, Hub, IndexFormatError, Reader, Receiving, VersionServer, index
from rose.publish.leases import LONGEST_TTL_S, MOST_READERS, Leases
from rose.publish.upkeep import Latest, Upkeep
from weight_transfer import (
    CatalogError,
    ChunkStore,
    Manifest,
    Publisher,
    Receiver,
    SigningKey,
    TensorBits,
)
from weight_transfer.catalog import Catalog, Published

KEY = SigningKey.generate()
VERSIONS = 6


def tensors(version: int) -> dict[str, TensorBits]:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, 4_096, dtype="<u2")
    for step in range(1, version + 1):
        bits[rng.integers(0, bits.size, 40)] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


class Trainer:
    """A publisher's store and server."""

    def __init__(self, root: Path, port: int) -> None:
        self.store = ChunkStore(root)
        self.leases = Leases(time.monotonic() - LONGEST_TTL_S)
        self.publisher = Publisher(self.store, "job", "trainer", KEY, chunk_bytes=2_048)
        self.server = VersionServer(self.store, port, leases=self.leases)
        self.troubles: list[str] = []
        self.upkeep = Upkeep(self.store, self.publisher, self.leases, self.troubles.append)

    def publish(self, version: int) -> None:
        self.publisher.publish(version, version - 1, tensors(version - 1), tensors(version))
        self.upkeep.published(Latest(version, version - 1, tensors(version)))


@pytest.fixture
async def trainer(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Trainer]:
    trainer = Trainer(tmp_path / "origin", unused_tcp_port)
    await trainer.server.start()
    yield trainer
    await trainer.upkeep.close()
    await trainer.server.close()


async def joined(
    trainer: Trainer, folder: Path, receiver: Receiver, target: int, *, rebase: bool = False
) -> int:
    """Bring a replica to a version; returns how many manifests it took."""
    async with aiohttp.ClientSession() as session:
        receiving = Receiving(ChunkStore(folder), Caps())
        chain = VersionChain()
        known = KnownVersion("job", target, target - 1, trainer.server.url)
        chain.add(known)
        source = Source(
            session, Hub(session, receiving), chain, KEY.verify_key, Reader(session, "node")
        )
        wish = Wish("r0", receiver.version, known, rebase)
        brought = await bring(source, wish, lambda _: None, set())
        receiving.close()
    manifests = [Manifest.from_json(path.read_bytes()) for path in brought.manifests]
    chunks = {ref.id: receiving.store.get(ref.id) for m in manifests for ref in m.chunks}
    receiver.commit(receiver.stage_chain(manifests, chunks, KEY.verify_key, time.time()))
    assert receiver.version == brought.version == target
    return len(manifests)


def equal(receiver: Receiver, version: int) -> bool:
    return np.array_equal(receiver.tensors["w"].bits, tensors(version)["w"].bits)


@pytest.mark.parametrize("base", [None, 0, 1, 3, VERSIONS])
async def test_a_join_at_any_version_is_bit_exact(
    base: int | None, trainer: Trainer, tmp_path: Path
) -> None:
    for version in range(1, VERSIONS + 1):
        trainer.publisher.publish(version, version - 1, tensors(version - 1), tensors(version))
    if base is not None:
        trainer.publisher.publish_base(base, tensors(base))
    for held in range(VERSIONS):
        receiver = Receiver(tensors(held), held)
        steps = await joined(trainer, tmp_path / f"{held}", receiver, VERSIONS)
        assert equal(receiver, VERSIONS)
        assert steps <= VERSIONS - held


async def test_wrong_weights_are_healed_by_a_newer_base_only(
    trainer: Trainer, tmp_path: Path
) -> None:
    for version in range(1, 5):
        trainer.publisher.publish(version, version - 1, tensors(version - 1), tensors(version))
    other = {"w": TensorBits("w", "bfloat16", (64, 64), np.zeros(4_096, "<u2"))}
    receiver = Receiver(other, 2)
    with pytest.raises(CatalogError):
        await joined(trainer, tmp_path / "a", receiver, 4, rebase=True)
    trainer.publisher.publish_base(2, tensors(2))
    with pytest.raises(CatalogError):
        await joined(trainer, tmp_path / "a", receiver, 4, rebase=True)
    trainer.publisher.publish_base(3, tensors(3))
    assert await joined(trainer, tmp_path / "a", receiver, 4, rebase=True) == 2
    assert equal(receiver, 4)
    assert rebased(Catalog({1: 5, 4: 9}, (Published(2, 1, 1),)), 2, 4).base == 4


async def test_a_base_follows_a_long_chain_and_only_leased_versions_outlive_it(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_transfer.catalog.MOST_DELTAS", 3)
    trainer.publish(1)
    await trainer.upkeep.settle()
    async with aiohttp.ClientSession() as session:
        reader = Reader(session, "slow")
        async with reader.lease(trainer.server.url, "r0", 1):
            for version in range(2, 6):
                trainer.publish(version)
            await trainer.upkeep.settle()
            monkeypatch.setattr(trainer.leases, "live", _without_announced(trainer.leases))
            trainer.publish(6)
            await trainer.upkeep.settle()
            assert trainer.store.bases(), "it was due"
            assert trainer.store.versions() == (2, 3, 4, 5, 6)
            receiver = Receiver(tensors(1), 1)
            await joined(trainer, tmp_path / "slow", receiver, 6)
            assert equal(receiver, 6)
    trainer.leases._by_reader.clear()
    trainer.publish(7)
    await trainer.upkeep.settle()
    base = trainer.store.bases()[-1]
    assert trainer.store.versions() == tuple(range(base + 1, 8))
    assert trainer.troubles == []
    joiner = Receiver(tensors(0))
    await joined(trainer, tmp_path / "new", joiner, 7)
    assert equal(joiner, 7)


def _without_announced(leases: Leases) -> Callable[[float], list[object]]:
    live = leases.live
    return lambda now_s: [each for each in live(now_s) if not each.reader.startswith("announced")]


async def test_a_base_in_the_making_does_not_hold_a_version_up(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_transfer.catalog.MOST_DELTAS", 1)
    begun, made = asyncio.Event(), asyncio.Event()
    loop, make = asyncio.get_running_loop(), trainer.publisher.publish_base

    def slow(version: int, new: dict[str, TensorBits]) -> Manifest:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(made.wait(), loop).result()
        return make(version, new)

    monkeypatch.setattr(trainer.publisher, "publish_base", slow)
    trainer.publish(1)
    trainer.publish(2)
    await begun.wait()
    async with asyncio.timeout(1), trainer.upkeep.publishing:
        trainer.publish(3)
    assert trainer.store.bases() == ()
    made.set()
    await trainer.upkeep.settle()
    assert trainer.store.bases()


async def test_what_was_just_announced_waits_for_readers_to_lease_it(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_transfer.catalog.MOST_DELTAS", 1)
    for version in (1, 2, 3):
        trainer.publish(version)
        await trainer.upkeep.settle()
    assert trainer.store.bases()
    assert trainer.store.versions() == (1, 2, 3)


def test_leases_end_are_bounded_and_are_waited_for_after_a_restart() -> None:
    leases = Leases(0.0)
    assert not leases.settled(LONGEST_TTL_S - 1)
    assert leases.settled(LONGEST_TTL_S)
    leases.take("a", 3, 1e9, 0.0)
    assert [lease.version for lease in leases.live(1.0)] == [3]
    assert leases.live(LONGEST_TTL_S) == []
    for bad in (("", 1, 1.0), ("a", -1, 1.0), ("a", 1, 0.0), ("a", 1, float("nan"))):
        with pytest.raises(RefusedError):
            leases.take(*bad, 0.0)
    for number in range(MOST_READERS):
        leases.take(f"r{number}", 1, 60.0, 200.0)
    with pytest.raises(RefusedError, match="hold leases already"):
        leases.take("one more", 1, 60.0, 200.0)


async def test_a_lease_that_says_nothing_is_refused(trainer: Trainer) -> None:
    async with aiohttp.ClientSession() as session:
        for body in (b"", b"{}", b'{"reader":"a","version":"x","ttl_s":1}', b"[]"):
            async with session.post(f"{trainer.server.url}/leases", data=body) as answer:
                assert answer.status == 400


def test_a_catalog_survives_the_wire_and_anything_else_is_refused() -> None:
    catalog = Catalog({4: 100}, (Published(5, 4, 7), Published(6, 5, 8)))
    assert index.read(index.written(catalog)) == catalog
    refused = (
        b"",
        b"[]",
        b'{"bases":{}}',
        b'{"bases":{"x":1},"deltas":[]}',
        b'{"bases":{},"deltas":[[1,2,3]]}',
        b'{"bases":{},"deltas":[[2,1,-3]]}',
    )
    for raw in refused:
        with pytest.raises(IndexFormatError):
            index.read(raw)

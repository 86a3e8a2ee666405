"""A reader that joins at any version, with any bases, ends bit-exact; what readers need stays."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from rose.node.weight_updates import (
    AnnouncedVersions,
    KnownVersion,
    UpdateRequest,
    WeightSource,
    fetch_update,
    rebased,
)
from rose.weight_distribution import VersionServer
from rose.weight_distribution.retention import Latest, RetentionTask
from tests.harness.waiting import PATIENCE_S
from tests.harness.weight_peers import reading
from weight_transfer import (
    CatalogError,
    ChunkStore,
    Manifest,
    Receiver,
    SigningKey,
    TensorBits,
    VersionPublisher,
)
from weight_transfer.catalog import (
    LONGEST_TTL_S,
    MOST_OF_A_PEER,
    MOST_READERS,
    Catalog,
    Published,
    ReadLeases,
)
from weight_transfer.errors import IndexFormatError, ReadLeaseError
from weight_transfer.fetch import (
    PublisherClient,
    publisher_client,
)
from weight_transfer.fetch.publisher_client import decode_catalog, encode_catalog
from weight_transfer.format.signing import Envelope, Kind
from weight_transfer.serve import Signer

KEY = SigningKey.generate()
VERSIONS = 6


def tensors(version: int) -> dict[str, TensorBits]:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, 4_096, dtype="<u2")
    for step in range(1, version + 1):
        bits[rng.integers(0, bits.size, 40)] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


class RetainedTrainer:
    """A publisher's store and server."""

    def __init__(self, root: Path, port: int) -> None:
        self.store = ChunkStore(root)
        self.leases = ReadLeases(time.monotonic() - LONGEST_TTL_S)
        self.publisher = VersionPublisher(self.store, "job", "trainer", KEY, chunk_bytes=2_048)
        self.server = VersionServer(self.store, port, leases=self.leases, signer=Signer("job", KEY))
        self.troubles: list[str] = []
        self.retention = RetentionTask(
            self.store, self.publisher, self.leases, self.troubles.append
        )

    def publish_chain(self, newest: int) -> None:
        """Publish versions 1 to `newest`, of which nothing is ever deleted."""
        for version in range(1, newest + 1):
            self.publisher.publish(version, version - 1, tensors(version - 1), tensors(version))

    def publish(self, version: int) -> None:
        self.publisher.publish(version, version - 1, tensors(version - 1), tensors(version))
        self.retention.published(Latest(version, version - 1, tensors(version)))


@pytest.fixture
async def trainer(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[RetainedTrainer]:
    trainer = RetainedTrainer(tmp_path / "origin", unused_tcp_port)
    await trainer.server.start()
    yield trainer
    await trainer.retention.close()
    await trainer.server.close()


async def joined(
    trainer: RetainedTrainer, folder: Path, receiver: Receiver, target: int, *, rebase: bool = False
) -> int:
    """Bring a replica to a version; return how many manifests it took."""
    chain, known = AnnouncedVersions(), KnownVersion("job", target, target - 1, trainer.server.url)
    chain.add(known)
    async with reading(folder) as fetcher:
        client = PublisherClient(fetcher._session, "node", KEY.verify_key)
        source = WeightSource(fetcher._session, fetcher, chain, KEY.verify_key, client)
        wish = UpdateRequest("r0", receiver.version, known, rebase)
        brought = await fetch_update(source, wish, lambda _: None, set())
        store = fetcher.receiving.store
    manifests = [Manifest.from_bytes(path.read_bytes()) for path in brought.manifests]
    chunks = {ref.id: store.get(ref.id) for m in manifests for ref in m.chunks}
    receiver.commit(receiver.decode_chain(manifests, chunks, KEY.verify_key, time.time()))
    assert receiver.version == brought.version == target
    return len(manifests)


def equal(receiver: Receiver, version: int) -> bool:
    return np.array_equal(receiver.tensors["w"].bits, tensors(version)["w"].bits)


@pytest.mark.parametrize("base", [None, 0, 1, 3, VERSIONS])
async def test_a_join_at_any_version_is_bit_exact(
    base: int | None, trainer: RetainedTrainer, tmp_path: Path
) -> None:
    trainer.publish_chain(VERSIONS)
    if base is not None:
        trainer.publisher.publish_base(base, tensors(base))
    for held in range(VERSIONS):
        receiver = Receiver(tensors(held), held)
        steps = await joined(trainer, tmp_path / f"{held}", receiver, VERSIONS)
        assert equal(receiver, VERSIONS)
        assert steps <= VERSIONS - held


async def test_wrong_weights_are_healed_by_a_newer_base_only(
    trainer: RetainedTrainer, tmp_path: Path
) -> None:
    trainer.publish_chain(4)
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
    trainer: RetainedTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_transfer.catalog.MOST_DELTAS", 3)
    trainer.publish(1)
    await trainer.retention.settle()
    async with aiohttp.ClientSession() as session:
        publisher_client = PublisherClient(session, "slow")
        async with publisher_client.lease(trainer.server.url, "r0", 1):
            for version in range(2, 6):
                trainer.publish(version)
            await trainer.retention.settle()
            monkeypatch.setattr(trainer.leases, "live", _without_announced(trainer.leases))
            trainer.publish(6)
            await trainer.retention.settle()
            assert trainer.store.bases(), "it was due"
            assert trainer.store.versions() == (2, 3, 4, 5, 6)
            receiver = Receiver(tensors(1), 1)
            await joined(trainer, tmp_path / "slow", receiver, 6)
            assert equal(receiver, 6)
    trainer.leases._by_peer.clear()
    trainer.publish(7)
    await trainer.retention.settle()
    base = trainer.store.bases()[-1]
    assert trainer.store.versions() == tuple(range(base + 1, 8))
    assert trainer.troubles == []
    joiner = Receiver(tensors(0))
    await joined(trainer, tmp_path / "new", joiner, 7)
    assert equal(joiner, 7)


def _without_announced(leases: ReadLeases) -> Callable[[float], list[object]]:
    live = leases.live
    return lambda now_s: [each for each in live(now_s) if not each.reader.startswith("announced")]


async def test_a_base_in_the_making_does_not_hold_a_version_up(
    trainer: RetainedTrainer, monkeypatch: pytest.MonkeyPatch
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
    async with asyncio.timeout(PATIENCE_S), trainer.retention.publishing:
        trainer.publish(3)
    assert trainer.store.bases() == ()
    made.set()
    await trainer.retention.settle()
    assert trainer.store.bases()


async def test_what_was_just_announced_waits_for_readers_to_lease_it(
    trainer: RetainedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_transfer.catalog.MOST_DELTAS", 1)
    for version in (1, 2, 3):
        trainer.publish(version)
        await trainer.retention.settle()
    assert trainer.store.bases()
    assert trainer.store.versions() == (1, 2, 3)


async def test_a_lease_is_renewed_after_whatever_one_try_raised(
    trainer: RetainedTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher_client, "LEASE_TTL_S", 0.03)
    went_on, tries = asyncio.Event(), itertools.count(1)
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):

        def request(method: str, url: str, **options: Any) -> Any:
            number = next(tries)
            if number == 2:
                raise RuntimeError("unheard of")
            if number > 2:
                went_on.set()
            return session.request(method, url, **options)

        moody: Any = SimpleNamespace(request=request)
        async with PublisherClient(moody, "node").lease(trainer.server.url, "r0", 1):
            await went_on.wait()
    assert "unheard of" in caplog.text


def test_leases_end_are_bounded_and_are_waited_for_after_a_restart() -> None:
    leases = ReadLeases(0.0)
    assert not leases.settled(LONGEST_TTL_S - 1)
    assert leases.settled(LONGEST_TTL_S)
    leases.take("a", 3, 1e9, 0.0)
    assert [lease.version for lease in leases.live(1.0)] == [3]
    assert leases.live(LONGEST_TTL_S) == []
    for bad in (("", 1, 1.0), ("a", -1, 1.0), ("a", 1, 0.0), ("a", 1, float("nan"))):
        with pytest.raises(ReadLeaseError):
            leases.take(*bad, 0.0)


def test_a_flood_of_leases_takes_none_from_other_peers() -> None:
    """One address, or many that are one, cannot keep a real node from what it still asks for."""
    leases = ReadLeases(0.0)
    leases.take("announced 7", 6, 60.0, 0.0)
    leases.take("node", 5, 60.0, 0.0, "10.0.0.7")
    for number in range(2 * MOST_READERS):
        leases.take(f"x{number}", 0, 120.0, 1.0, f"10.6.0.{number % 32}")
    leases.take("late", 5, 60.0, 2.0, "10.0.0.8")
    live = leases.live(3.0)
    assert len(live) <= MOST_READERS + 1
    assert {"announced 7", "node", "late"} <= {lease.reader for lease in live}
    for number in range(2 * MOST_OF_A_PEER):
        leases.take(f"y{number}", 0, 120.0, 3.0, "10.0.0.8")
    leases.take("late", 5, 60.0, 4.0, "10.0.0.8")
    assert "late" in {lease.reader for lease in leases.live(5.0)}, "it comes back as it renews"
    few = ReadLeases(0.0)
    for number in range(2 * MOST_OF_A_PEER):
        few.take(f"x{number}", 0, 120.0, 1.0, "10.6.6.6")
    assert len(few.live(2.0)) == MOST_OF_A_PEER
    assert few.live(LONGEST_TTL_S + 1.0) == []


async def test_a_lease_that_says_nothing_is_refused(trainer: RetainedTrainer) -> None:
    async with aiohttp.ClientSession() as session:
        for body in (
            b"",
            b"{}",
            b"[]",
            b"[" * 4_000,
            b'{"reader":' * 300,
            b'{"reader":"a","version":"x","ttl_s":1}',
            b'{"reader":"a","version":1e400,"ttl_s":1}',
            b'{"reader":"a","version":-1,"ttl_s":1}',
            b'{"reader":"a","version":1' + b"0" * 3_000 + b',"ttl_s":1}',
            b'{"reader":"a","version":1,"ttl_s":1e400}',
            b'{"reader":"a","version":1,"ttl_s":NaN}',
            b'{"reader":"\xff","version":1,"ttl_s":1}',
        ):
            async with session.post(f"{trainer.server.url}/leases", data=body) as answer:
                assert answer.status == 400


def test_a_catalog_survives_the_wire_and_anything_else_is_refused() -> None:
    catalog = Catalog({4: 100}, (Published(5, 4, 7), Published(6, 5, 8)))
    raw = encode_catalog(catalog, "job", KEY, 50.0)
    assert decode_catalog(raw, "job", KEY.verify_key, 60.0) == catalog
    assert decode_catalog(encode_catalog(catalog, "job", None, 50.0), "job", None, 60.0) == catalog
    good = b'{"job":"job","expires_s":99.0,"bases":%s,"deltas":%s}'
    steps = range(1, publisher_client.MOST_DELTAS + 2)
    many = b",".join(b"[%d,%d,1]" % (version, version - 1) for version in steps)
    lists = ((b"{}", b"[]"), (b'[["x",1]]', b"[]"))
    lists += tuple((b"[]", b"[%s]" % deltas) for deltas in (b"[1,2,3]", b"[2,1,-3]", many))
    refused = [good % each for each in (*lists, (b"[]", b"[[2,1,3],[2,1,3]]"))]
    refused += [b"", b"[]", b"[" * 100_000, (good % (b"[]", b"[]")).replace(b"99.0", b"1e400")]
    for payload in refused:
        envelope = Envelope(Kind.CATALOG, payload)
        with pytest.raises(IndexFormatError):
            decode_catalog(envelope.signed(KEY).to_bytes(), "job", KEY.verify_key, 60.0)
        with pytest.raises(IndexFormatError):
            decode_catalog(payload, "job", None, 60.0)
    with pytest.raises(IndexFormatError, match="are allowed"):
        decode_catalog(bytes(publisher_client.MAX_CATALOG_BYTES + 1), "job", None, 60.0)


def test_a_catalog_of_another_key_job_or_time_is_refused() -> None:
    catalog = Catalog({4: 100}, (Published(5, 4, 7),))
    raw, unsigned = (encode_catalog(catalog, "job", key, 50.0) for key in (KEY, None))
    late_s = 50.0 + publisher_client.LIFETIME_S
    for catalog_bytes, job, key, now_s, why in (
        (raw, "job", SigningKey.generate(), 60.0, "does not match key"),
        (raw, "other", KEY, 60.0, "versions of other"),
        (raw, "job", KEY, late_s, "expired"),
        (unsigned, "job", KEY, 60.0, "no signature"),
    ):
        with pytest.raises(IndexFormatError, match=why):
            decode_catalog(catalog_bytes, job, key.verify_key, now_s)


def test_the_longest_catalog_is_readable_and_more_is_left_to_older_ones() -> None:
    top, most = (1 << 63) - 1, publisher_client.MOST_DELTAS
    deltas = tuple(Published(top - n, top - n - 1, top) for n in range(2 * most))
    bases = {top - n: top for n in range(2 * publisher_client.MOST_BASES)}
    raw = encode_catalog(Catalog(bases, deltas), "job", KEY, 50.0)
    read = decode_catalog(raw, "job", KEY.verify_key, 60.0)
    assert read.newest == top
    assert len(read.deltas) == most


async def test_retention_that_breaks_is_told_and_taken_up_with_the_next_version(
    trainer: RetainedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, broke = trainer.store.catalog, []

    def once() -> Catalog:
        if not broke:
            broke.append(True)
            raise KeyError("a fault of the program")
        return catalog()

    monkeypatch.setattr(trainer.store, "catalog", once)
    trainer.publish(1)
    await trainer.retention.settle()
    trainer.publish(2)
    await trainer.retention.settle()
    assert len(trainer.troubles) == 1
    assert trainer.troubles[0].startswith("retention after version 1: KeyError")

"""Bad weights are one line in the node's log; the old version stays, and the next try works."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rose.errors import RefusedError
from rose.eventlog import EventLog, JsonlLog
from rose.node import updates
from rose.node.bringing import Source
from rose.node.chain import KnownVersion, VersionChain
from rose.node.replica_client import Applied
from rose.node.updates import Updates
from rose.publish import Caps, Hub, Reader, Receiving, VersionServer
from rose.publish import download as download_module
from rose.publish import hub as hub_module
from weight_transfer import (
    ChunkStore,
    Manifest,
    OnUpdate,
    Publisher,
    Receiver,
    SigningKey,
    TensorBits,
    WeightError,
    WrongBaseError,
)

KEY = SigningKey.generate()


def tensors(version: int) -> dict[str, TensorBits]:
    bits = np.arange(4_096, dtype=np.uint16)
    bits[::7] += np.uint16(version)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


class Engine:
    """Stands in for a replica's client: a real receiver behind it."""

    def __init__(self) -> None:
        self.receiver = Receiver(tensors(0))

    async def apply(self, manifests: list[Path], chunks: Path, on_update: OnUpdate) -> Applied:
        read = [Manifest.from_json(path.read_bytes()) for path in manifests]
        assert on_update is read[-1].on_update
        store = ChunkStore(chunks.parent)
        bodies = {ref.id: store.get(ref.id) for each in read for ref in each.chunks}
        try:
            staged = self.receiver.stage_chain(read, bodies, KEY.verify_key, 0.0)
        except WrongBaseError:
            raise
        except WeightError as error:
            raise RefusedError(str(error)) from error
        self.receiver.commit(staged)
        return Applied(staged.version, True, True, 0.0, 0.0, 0.0, staged.wire_bytes, 1)


class Case:
    """One replica's updates over a real publisher."""

    def __init__(self, folder: Path, port: int, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.origin = ChunkStore(folder / "origin")
        self.server = VersionServer(self.origin, port)
        self.engine = Engine()
        self.chain = VersionChain()
        self.receiving = Receiving(ChunkStore(folder / "node"), Caps())
        self.unproven: list[str] = []
        self.logs = ExitStack()
        source = Source(
            session,
            Hub(session, self.receiving),
            self.chain,
            KEY.verify_key,
            Reader(session, "n0"),
        )
        self.updates = Updates(
            "r0",
            "dedicated",
            self.engine,  # type: ignore[arg-type]
            source,
            self.logs.enter_context(JsonlLog(folder / "activations.jsonl")),
            EventLog(folder, "n0"),
            lambda _: None,
            lambda _, why: self.unproven.append(why),
        )

    def publish(self, version: int, key: SigningKey = KEY, lifetime_s: float = 60.0) -> None:
        publisher = Publisher(self.origin, "job", "trainer", key, 1_024, lifetime_s)
        publisher.publish(version, version - 1, tensors(version - 1), tensors(version))

    def announce(self, version: int) -> None:
        self.chain.add(KnownVersion("job", version, version - 1, self.server.url))
        self.updates.wake()

    async def active(self, version: int) -> None:
        async with asyncio.timeout(5):
            while self.updates.version != version:  # noqa: ASYNC110 -- it has nobody to tell
                await asyncio.sleep(0.01)
        held = self.engine.receiver.tensors["w"].bits
        assert np.array_equal(held, tensors(version)["w"].bits)

    async def noted(self, event: str) -> str:
        async with asyncio.timeout(5):
            while True:
                lines = (self.folder / "events-n0.jsonl").read_text().splitlines()
                found = [each for line in lines if (each := json.loads(line))["event"] == event]
                if found:
                    return str(found[-1]["message"])
                await asyncio.sleep(0.01)


@pytest.fixture
async def case(
    tmp_path: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Case]:
    monkeypatch.setattr(updates, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(updates, "MAX_PAUSE_S", 0.05)
    for module in (hub_module, download_module):
        monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.01)
    async with aiohttp.ClientSession() as session:
        case = Case(tmp_path, unused_tcp_port, session)
        await case.server.start()
        case.updates.engine_up(0)
        running = asyncio.create_task(case.updates.run())
        case.publish(1)
        case.announce(1)
        await case.active(1)
        yield case
        assert not running.done(), "nothing bad ends the node"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        case.receiving.close()
        case.logs.close()
        await case.server.close()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"lifetime_s": 0.0}, "version 2 of job expired; publish a newer one"),
        ({"key": SigningKey.generate()}, "signature does not match"),
    ],
    ids=["expired", "of another key"],
)
async def test_a_manifest_that_must_not_be_used_leaves_the_old_version(
    case: Case, bad: dict[str, Any], said: str
) -> None:
    case.publish(2, **bad)
    case.announce(2)
    assert said in await case.noted("version_not_fetched")
    assert case.updates.version == 1
    case.origin.manifest_path(2).unlink()
    case.publish(2)
    await case.active(2)
    assert case.unproven == []


async def test_an_unsigned_manifest_is_refused(case: Case) -> None:
    case.publish(2)
    path = case.origin.manifest_path(2)
    signed = path.read_bytes()
    path.write_text(json.dumps(json.loads(signed) | {"signature": ""}))
    case.announce(2)
    assert "signature does not match" in await case.noted("version_not_fetched")
    path.write_bytes(signed)
    await case.active(2)


async def test_a_full_disk_is_said_and_what_came_is_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = download_module.Download._write
    room = 20

    def write(self: download_module.Download, block: bytes) -> None:
        if len(block) <= room:
            whole(self, block)
            return
        assert self._file
        self._file.write(block[:room])  # As a file system does: what fits is there.
        self._file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download_module.Download, "_write", write)
    case.publish(2)
    case.announce(2)
    said = await case.noted("version_not_fetched")
    assert "No space left on device" in said
    assert "make room" in said
    assert case.updates.version == 1
    monkeypatch.setattr(download_module.Download, "_write", whole)
    await case.active(2)
    assert case.unproven == []


async def test_a_wrong_base_is_healed_by_a_base(case: Case) -> None:
    case.publish(2)
    case.publish(3)
    case.engine.receiver = Receiver(
        {"w": TensorBits("w", "bfloat16", (64, 64), np.ones(4_096, "<u2"))}, 1
    )
    Publisher(case.origin, "job", "trainer", KEY).publish_base(2, tensors(2))
    case.announce(3)
    await case.noted("wrong_base")
    await case.active(3)
    assert case.unproven == []


async def test_a_wrong_base_without_a_newer_one_ends_the_engine(case: Case) -> None:
    case.engine.receiver = Receiver(
        {"w": TensorBits("w", "bfloat16", (64, 64), np.ones(4_096, "<u2"))}, 1
    )
    case.publish(2)
    case.announce(2)
    assert "publish a base" in await case.noted("quarantined")
    assert case.unproven


@pytest.mark.parametrize("where", ["chunk", "part"])
async def test_a_bit_that_flips_on_the_nodes_disk_is_named_and_healed(
    case: Case, where: str
) -> None:
    case.publish(2)
    ref = case.origin.get_manifest(2).chunks[0]
    body = bytearray(case.origin.get(ref.id))
    body[len(body) // 2] ^= 1
    store = case.receiving.store
    if where == "chunk":
        (store.chunks_dir / ref.id).write_bytes(body)
    else:
        store.part_path(ref.id).write_bytes(body[:-5])
    case.announce(2)
    await case.active(2)
    lines = (case.folder / "events-n0.jsonl").read_text()
    assert "chunk_rejected" in lines
    assert ref.id in lines
    assert store.sound(ref.id)


def _flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


async def test_a_bit_that_flips_in_a_relay_is_named_and_dropped_there_too(
    case: Case, unused_tcp_port_factory: Callable[[], int]
) -> None:
    """The node says its doubt, the relay looks at its own copy."""
    case.publish(2)
    refs = case.origin.get_manifest(2).chunks
    async with aiohttp.ClientSession() as session:
        port = unused_tcp_port_factory()
        receiving = Receiving(ChunkStore(case.folder / "relay"), Caps())
        url = f"http://127.0.0.1:{port}"
        hub = Hub(session, receiving, url, [url])
        server = VersionServer(receiving.store, port, hub=hub)
        await server.start()
        await hub.manifest("job", 2, case.server.url, KEY.verify_key)
        damaged = refs[0]
        await asyncio.gather(*(hub.obtain(ref) for ref in refs))
        _flip(receiving.store.chunks_dir / damaged.id)
        node = Hub(session, case.receiving, "", [url])
        await node.manifest("job", 2, case.server.url, KEY.verify_key)
        rejected: list[str] = []
        for ref in refs:
            await node.obtain(ref, rejected.append)
        assert rejected == [damaged.id]
        assert all(case.receiving.store.sound(ref.id) for ref in refs)
        assert not receiving.store.has(damaged.id)
        await hub.obtain(damaged)
        assert receiving.store.sound(damaged.id)
        await hub.close()
        await server.close()
        receiving.close()

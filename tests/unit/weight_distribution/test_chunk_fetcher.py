"""Nodes over real HTTP: each chunk crosses the slow link once, whoever dies or lies."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from msgspec import structs

from rose.weight_distribution import VersionServer
from rose.weight_distribution.credentials import Credentials
from weight_transfer import ChunkStore, Manifest, SigningKey, TensorBits, VersionPublisher
from weight_transfer.errors import FetchError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, fetch_version
from weight_transfer.fetch import download as download_module
from weight_transfer.fetch import fetcher as fetcher_module
from weight_transfer.fetch.relay_order import order

KEY = SigningKey.from_hex("05" * 32)
CHUNK_BYTES = 200_000
ELEMENTS = 900_000


class Origin:
    """The trainer's side: counts what is asked of it, byte by byte."""

    def __init__(self, root: Path, port: int) -> None:
        self.store = ChunkStore(root)
        publisher = VersionPublisher(self.store, "job", "trainer", KEY, chunk_bytes=CHUNK_BYTES)
        old, new = (self.tensors(step) for step in (0, 1))
        self.manifest: Manifest = publisher.publish(1, 0, old, new)
        self.url = f"http://127.0.0.1:{port}"
        self.sent: dict[str, int] = {}
        self.break_after: dict[str, int] = {}
        self.rate: float | None = None
        self.go_on: asyncio.Event | None = None
        """While it is not set, the last third of a chunk is held back."""
        self._port = port
        self._runner: web.AppRunner | None = None

    @staticmethod
    def tensors(step: int) -> dict[str, TensorBits]:
        bits = np.random.default_rng(step).integers(0, 1 << 16, ELEMENTS, dtype="<u2")
        return {"w": TensorBits("w", "bfloat16", (900, 1_000), bits)}

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{kind:manifests|chunks}/{name}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def stop(self) -> None:
        assert self._runner
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        kind, name = request.match_info["kind"], request.match_info["name"]
        path = self.store.chunks_dir / name
        if kind == "manifests":
            path = self.store.manifest_path(int(name))
        body, at = path.read_bytes(), request.http_range.start or 0
        response = web.StreamResponse(status=206 if at else 200)
        response.content_length = len(body) - at
        await response.prepare(request)
        stop = self.break_after.pop(name, len(body))
        for start in range(at, len(body), 16_384):
            if self.go_on and kind == "chunks" and start > len(body) * 2 // 3:
                await self.go_on.wait()
            piece = body[start : min(start + 16_384, stop)]
            if not piece:
                assert request.transport
                request.transport.abort()
                break
            await response.write(piece)
            self.sent[name] = self.sent.get(name, 0) + len(piece)
            if self.rate:
                await asyncio.sleep(len(piece) / self.rate)
        return response

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent.values())


class Node:
    """One member: store, fetcher and server."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession, port: int) -> None:
        self.store = ChunkStore(folder)
        self.url = f"http://127.0.0.1:{port}"
        self.fetcher = ChunkFetcher(session, DownloadLimits(self.store, Caps(threads=2)), self.url)
        self.server = VersionServer(self.store, port, fetcher=self.fetcher)
        self.rejected: list[str] = []

    async def fetch(self, origin: Origin) -> int:
        fetched = await fetch_version(
            self.fetcher, origin.url, "job", 1, KEY.verify_key, self.rejected.append, set()
        )
        for ref in origin.manifest.chunks:
            self.store.get(ref.id)
        return fetched.wire_bytes

    async def die(self) -> None:
        await self.fetcher.close()
        await self.server.close()


class Cluster:
    def __init__(self, origin: Origin, nodes: list[Node]) -> None:
        self.origin = origin
        self.nodes = nodes
        for node in nodes:
            node.fetcher.enrol(each.url for each in nodes)

    def relay_of(self, name: str) -> Node:
        first = order([node.url for node in self.nodes], name)[0]
        return next(node for node in self.nodes if node.url == first)

    async def fetch_all(self) -> None:
        await asyncio.gather(*(node.fetch(self.origin) for node in self.nodes))


@pytest.fixture
async def cluster(
    tmp_path: Path, unused_tcp_port_factory: object, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(fetcher_module, "KNOWN_WITHIN_S", 0.3)
    port = unused_tcp_port_factory
    assert callable(port)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        origin = Origin(tmp_path / "origin", port())
        await origin.start()
        stack.push_async_callback(origin.stop)
        nodes = [Node(tmp_path / f"node-{n}", session, port()) for n in range(4)]
        for node in nodes:
            await node.server.start()
            stack.push_async_callback(node.die)
        yield Cluster(origin, nodes)


def slow_link_bytes(origin: Origin) -> int:
    return origin.manifest.wire_bytes + len(origin.manifest.to_bytes())


async def test_each_chunk_crosses_the_slow_link_once_for_any_number_of_nodes(
    cluster: Cluster,
) -> None:
    await cluster.fetch_all()
    assert cluster.origin.bytes_sent <= 1.02 * slow_link_bytes(cluster.origin)
    assert len(cluster.origin.sent) == len(set(cluster.origin.manifest.chunks)) + 1


async def test_a_relay_sends_on_what_it_has_not_whole(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "BLOCK_BYTES", 16_384)
    origin = cluster.origin
    ref = max(origin.manifest.chunks, key=lambda ref: ref.encoded_bytes)
    relay = cluster.relay_of(ref.id)
    other = next(node for node in cluster.nodes if node is not relay)
    for node in (relay, other):
        await node.fetcher.manifest("job", 1, origin.url, KEY.verify_key)
    origin.go_on = asyncio.Event()
    coming = asyncio.create_task(other.fetcher.obtain(ref))
    for _ in range(1_000):
        part = other.fetcher.download(ref.id)
        if part is not None and part.here:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("nothing came while the origin held the rest back")
    assert not relay.store.has(ref.id)
    origin.go_on.set()
    await coming
    assert origin.sent[ref.id] == ref.encoded_bytes


async def test_a_broken_connection_goes_on_at_its_byte(cluster: Cluster) -> None:
    origin = cluster.origin
    for ref, after in zip(origin.manifest.chunks, itertools.cycle([1, 65_536, 150_000])):
        origin.break_after[ref.id] = after
    await cluster.nodes[0].fetch(origin)
    assert cluster.nodes[0].rejected == []
    for ref in origin.manifest.chunks:
        assert origin.sent[ref.id] <= ref.encoded_bytes + 16_384, "resumed, not sent anew"


async def test_a_dead_relays_chunks_come_through_the_next_one_and_only_they(
    cluster: Cluster,
) -> None:
    dead = cluster.relay_of(cluster.origin.manifest.chunks[0].id)
    await dead.die()
    alive = [node for node in cluster.nodes if node is not dead]
    await asyncio.gather(*(node.fetch(cluster.origin) for node in alive))
    for ref in cluster.origin.manifest.chunks:
        assert cluster.origin.sent[ref.id] == ref.encoded_bytes, "once, though its relay is dead"


async def test_a_relay_that_dies_in_the_middle_costs_nobody_a_bit(cluster: Cluster) -> None:
    cluster.origin.rate = 2_000_000.0
    fetching = [asyncio.create_task(node.fetch(cluster.origin)) for node in cluster.nodes[1:]]
    own = asyncio.create_task(cluster.nodes[0].fetch(cluster.origin))
    await asyncio.sleep(0.3)
    own.cancel()
    await cluster.nodes[0].die()
    await asyncio.gather(*fetching)
    for node in cluster.nodes[1:]:
        for ref in cluster.origin.manifest.chunks:
            assert node.store.get(ref.id)


async def test_a_neighbour_that_lies_is_found_and_avoided(cluster: Cluster) -> None:
    liar = cluster.nodes[0]
    await liar.fetch(cluster.origin)
    for path in liar.store.chunks_dir.iterdir():
        body = bytearray(path.read_bytes())
        body[len(body) // 2] ^= 1
        path.write_bytes(body)
    await asyncio.gather(*(node.fetch(cluster.origin) for node in cluster.nodes[1:]))
    assert any(node.rejected for node in cluster.nodes[1:])
    for node in cluster.nodes[1:]:
        # From the liar itself once, and once as the unproven beginning that another passed on.
        assert all(node.rejected.count(name) <= 2 for name in node.rejected)


async def test_a_chunk_that_arrives_corrupt_at_its_relay_goes_to_nobody(cluster: Cluster) -> None:
    origin = cluster.origin
    for ref in origin.manifest.chunks:
        path = origin.store.chunks_dir / ref.id
        body = bytearray(path.read_bytes())
        body[0] ^= 1
        path.write_bytes(body)
    with pytest.raises(FetchError, match="corrupt"):
        await cluster.nodes[0].fetch(origin)
    for node in cluster.nodes:
        assert not any(node.store.has(ref.id) for ref in origin.manifest.chunks)


async def test_a_part_file_of_an_earlier_life_is_gone_on_with(cluster: Cluster) -> None:
    node, ref = cluster.nodes[0], cluster.origin.manifest.chunks[0]
    node.fetcher.enrol([node.url])
    body = cluster.origin.store.get(ref.id)
    node.store.part_path(ref.id).write_bytes(body[: len(body) // 2])
    await node.fetch(cluster.origin)
    assert cluster.origin.sent[ref.id] == len(body) - len(body) // 2


async def test_chunks_come_from_the_ranks_that_published_them(cluster: Cluster) -> None:
    """A rank's chunks lie in its own store; the manifest says whose are where."""
    origin, other = cluster.origin, cluster.nodes[3]
    moved = origin.manifest.chunks[0].id
    other.store.put(origin.store.get(moved))
    tensor = origin.manifest.tensors[0]
    theirs = tuple(
        structs.replace(ref, origin=0 if ref.id == moved else None) for ref in tensor.chunks
    )
    manifest = replace(
        origin.manifest, tensors=(structs.replace(tensor, chunks=theirs),), origins=(other.url,)
    ).signed(KEY)
    origin.store.manifest_path(1).write_bytes(manifest.to_bytes())
    node = cluster.nodes[0]
    node.fetcher.enrol([node.url])
    await node.fetch(origin)
    assert moved not in origin.sent


async def test_callers_without_the_token_get_nothing(
    cluster: Cluster, unused_tcp_port: int
) -> None:
    server = VersionServer(cluster.origin.store, unused_tcp_port, credentials=Credentials("secret"))
    await server.start()
    name = cluster.origin.manifest.chunks[0].id
    async with aiohttp.ClientSession() as session:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer other"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
        ):
            async with session.get(f"{server.url}/chunks/{name}", headers=headers) as response:
                assert response.status == status
    await server.close()

"""A publisher, a slow link and members of a cluster, each of which can be killed and revived.

To kill is to abort every connection and to drop everything but the files.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import aiohttp
import numpy as np
from aiohttp import web

from rose.weight_distribution import VersionServer
from tests.harness.weight_peers import KEY, fetched
from weight_transfer import ChunkStore, Manifest, Receiver, TensorBits, VersionPublisher
from weight_transfer.errors import FetchError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits
from weight_transfer.fetch.download import order

CHUNK_BYTES, CHUNKS = 100_000, 5
PIECE_BYTES = 8_192
TRIES = 40


def tensors(step: int, chunks: int = CHUNKS) -> dict[str, TensorBits]:
    """Return weights that have nothing to do with those of another step."""
    bits = np.random.default_rng(step).integers(0, 1 << 16, chunks * CHUNK_BYTES // 2, dtype="<u2")
    return {"w": TensorBits("w", "bfloat16", (chunks * 50, 1_000), bits)}


class CountingStore(ChunkStore):
    """Store that says when a chunk is whole in it."""

    def __init__(self, root: Path, on_whole: Callable[[], None]) -> None:
        super().__init__(root)
        self._on_whole = on_whole

    def adopt(self, name: str, part: BinaryIO) -> None:
        super().adopt(name, part)
        self._on_whole()


class SlowOrigin:
    """The publisher's server: counts each chunk's bytes as they go onto the slow link."""

    def __init__(self, root: Path, port: int, chunks: int = CHUNKS) -> None:
        self.store = ChunkStore(root)
        publisher = VersionPublisher(self.store, "job", "trainer", KEY, chunk_bytes=CHUNK_BYTES)
        self.manifest: Manifest = publisher.publish(1, 0, tensors(0, chunks), tensors(1, chunks))
        self.url = f"http://127.0.0.1:{port}"
        self.sent = dict.fromkeys((ref.id for ref in self.manifest.chunks), 0)
        self.rate: float | None = None
        """Bytes a second of each connection, None for any."""
        self.break_after: dict[str, int] = {}
        """Number of a chunk's bytes after which its next connection breaks."""
        self.go_on: asyncio.Event | None = None
        """While it is not set, a chunk is held back from `held_from` of its bytes on."""
        self.held_from = 2 / 3
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/manifests/1", self._manifest)
        app.router.add_get("/chunks/{name}", self._chunk)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def kill(self) -> None:
        assert self._runner
        await abort(self._runner)

    async def _manifest(self, _: web.Request) -> web.Response:
        body = self.store.manifest_path(1).read_bytes()
        self.sent["manifest"] = self.sent.get("manifest", 0) + len(body)
        return web.Response(body=body)

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        name, at = request.match_info["name"], request.http_range.start or 0
        body = (self.store.chunks_dir / name).read_bytes()
        response = web.StreamResponse(status=206 if at else 200)
        response.content_length = len(body) - at
        await response.prepare(request)
        stop = self.break_after.pop(name, len(body))
        for start in range(at, len(body), PIECE_BYTES):
            if self.go_on and start >= len(body) * self.held_from:
                await self.go_on.wait()
            piece = body[start : min(start + PIECE_BYTES, stop)]
            if not piece:
                assert request.transport
                request.transport.abort()
                break
            self.sent[name] += len(piece)
            await response.write(piece)
            if self.rate:
                await asyncio.sleep(len(piece) / self.rate)
        return response


class ClusterMember:
    """One node; `live` again and again on the same folder."""

    def __init__(
        self, folder: Path, port: int, origin: SlowOrigin, on_whole: Callable[[], None]
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.store = CountingStore(folder, on_whole)
        self.rejected: list[str] = []
        self.lives = False
        self._origin = origin
        self._port = port
        self._fetching: asyncio.Task[None] | None = None

    async def live(self, members: list[str]) -> None:
        self._session = aiohttp.ClientSession()
        limits = DownloadLimits(self.store, Caps())
        self.fetcher = ChunkFetcher(self._session, limits, self.url, members)
        self._server = VersionServer(self.store, self._port, fetcher=self.fetcher)
        await self._server.start()
        self.lives = True

    async def fetch(self) -> None:
        """Fetch version 1 once."""
        await fetched(self.fetcher, self._origin.url, rejected=self.rejected)
        for ref in self._origin.manifest.chunks:
            self.store.get(ref.id)

    def begin(self) -> None:
        """Fetch it again and again until it is here."""
        self._fetching = asyncio.create_task(self._fetch())

    async def done(self) -> None:
        assert self._fetching
        await self._fetching

    async def _fetch(self) -> None:
        for _ in range(TRIES):
            try:
                await self.fetch()
            except FetchError:
                await asyncio.sleep(0.05)
            else:
                return
        raise AssertionError("never fetched")

    async def kill(self) -> None:
        if not self.lives:
            return
        self.lives = False
        assert self._server._listening
        port, self._server._listening = self._server._listening, None
        assert port._listener is not None
        port._listener.close()
        if self._fetching:
            self._fetching.cancel()
        await self._session.close()
        await asyncio.gather(self.fetcher.close(), abort(port._runner))

    async def end(self) -> None:
        await self.kill()
        self.fetcher.receiving.close()

    def landed(self, name: str) -> int:
        """Return the bytes of a chunk that are on its disk."""
        # In this order: a part may become the whole chunk at any moment.
        for path in (self.store.part_path(name), self.store.chunks_dir / name):
            with suppress(FileNotFoundError):
                return path.stat().st_size
        return 0


def received(store: ChunkStore) -> TensorBits:
    """Return the weights of an engine at version 0 after a store's version 1."""
    manifest, receiver = store.get_manifest(1), Receiver(tensors(0))
    chunks = {ref.id: store.get(ref.id) for ref in manifest.chunks}
    receiver.commit(receiver.decode(manifest, chunks, KEY.verify_key, manifest.created_s))
    return receiver.tensors["w"]


async def abort(runner: web.AppRunner) -> None:
    """End a server as a killed process does."""
    for site in list(runner.sites):
        await site.stop()
    assert runner.server
    for handler in list(runner.server.connections):
        if handler.transport:
            handler.transport.abort()
    await asyncio.sleep(0)
    await runner.cleanup()


class SlowCluster:
    """An origin and its readers, of which each may be asked by the others."""

    def __init__(self, folder: Path, ports: list[int], chunks: int = CHUNKS) -> None:
        self._loop = asyncio.get_running_loop()
        self.origin = SlowOrigin(folder / "origin", ports[0], chunks)
        self.members = [
            ClusterMember(folder / f"node-{n}", port, self.origin, self._on_whole)
            for n, port in enumerate(ports[1:])
        ]
        self._boundary = asyncio.Event()
        self._at = -1

    @property
    def urls(self) -> list[str]:
        return [member.url for member in self.members]

    async def start(self) -> None:
        await self.origin.start()
        for member in self.members:
            await member.live(self.urls)

    async def close(self) -> None:
        for member in self.members:
            await member.end()
        await self.origin.kill()

    async def boundary(self, chunks: int) -> None:
        """Wait until so many chunks are whole somewhere."""
        self._at = chunks
        self._look()
        await self._boundary.wait()

    def relay_of(self, name: str) -> ClusterMember:
        return next(m for m in self.members if m.url == order(self.urls, name)[0])

    def _on_whole(self) -> None:
        self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        names = (ref.id for ref in self.origin.manifest.chunks)
        whole = {name for name in names if any(m.store.has(name) for m in self.members)}
        if self._at >= 0 and len(whole) >= self._at:
            self._boundary.set()

"""A publisher, a slow link and three members of a cluster, each of which can be killed and revived.

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
from weight_transfer import ChunkStore, Manifest, Receiver, SigningKey, TensorBits, VersionPublisher
from weight_transfer.errors import FetchError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, fetch_version
from weight_transfer.fetch.relay_order import order

KEY = SigningKey.from_hex("06" * 32)
CHUNK_BYTES, CHUNKS = 100_000, 5
PIECE_BYTES = 8_192
TRIES = 40


def tensors(step: int) -> dict[str, TensorBits]:
    bits = np.random.default_rng(step).integers(0, 1 << 16, CHUNKS * CHUNK_BYTES // 2, dtype="<u2")
    return {"w": TensorBits("w", "bfloat16", (CHUNKS * 50, 1_000), bits)}


class CountingStore(ChunkStore):
    """Says when a chunk is whole here."""

    def __init__(self, root: Path, told: Callable[[], None]) -> None:
        super().__init__(root)
        self._told_whole = told

    def adopt(self, name: str, part: BinaryIO) -> None:
        super().adopt(name, part)
        self._told_whole()


class Origin:
    """The publisher's server: counts each chunk's bytes as they go onto the slow link."""

    def __init__(self, root: Path, port: int, rate: float) -> None:
        self.store = ChunkStore(root)
        publisher = VersionPublisher(self.store, "job", "trainer", KEY, chunk_bytes=CHUNK_BYTES)
        self.manifest: Manifest = publisher.publish(1, 0, tensors(0), tensors(1))
        self.url = f"http://127.0.0.1:{port}"
        self.sent = dict.fromkeys((ref.id for ref in self.manifest.chunks), 0)
        self._port = port
        self._rate = rate
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
        return web.Response(body=self.store.manifest_path(1).read_bytes())

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        name, at = request.match_info["name"], request.http_range.start or 0
        body = self.store.get(name)
        response = web.StreamResponse(status=206 if at else 200)
        response.content_length = len(body) - at
        await response.prepare(request)
        for start in range(at, len(body), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            self.sent[name] += len(piece)
            await response.write(piece)
            await asyncio.sleep(len(piece) / self._rate)
        return response


class Member:
    """One node; `live` again and again on the same folder."""

    def __init__(self, folder: Path, port: int, origin: Origin, told: Callable[[], None]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.store = CountingStore(folder, told)
        self.rejected: list[str] = []
        self._origin = origin
        self._port = port
        self._members: list[str] = []
        self._fetching: asyncio.Task[None] | None = None

    async def live(self, members: list[str]) -> None:
        self._members = members
        self._session = aiohttp.ClientSession()
        self.fetcher = ChunkFetcher(
            self._session, DownloadLimits(self.store, Caps()), self.url, members
        )
        self._server = VersionServer(self.store, self._port, fetcher=self.fetcher)
        await self._server.start()

    def fetch(self) -> None:
        self._fetching = asyncio.create_task(self._fetch())

    async def done(self) -> None:
        assert self._fetching
        await self._fetching

    async def _fetch(self) -> None:
        for _ in range(TRIES):
            try:
                await fetch_version(
                    self.fetcher,
                    self._origin.url,
                    "job",
                    1,
                    KEY.verify_key,
                    self.rejected.append,
                    set(),
                )
            except FetchError:
                await asyncio.sleep(0.05)
            else:
                return
        raise AssertionError("never fetched")

    async def kill(self) -> None:
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
        """Bytes of a chunk that are on its disk."""
        # In this order: a part may become the whole chunk at any moment.
        for path in (self.store.part_path(name), self.store.chunks_dir / name):
            with suppress(FileNotFoundError):
                return path.stat().st_size
        return 0

    def weights(self) -> dict[str, TensorBits]:
        """Return the weights of an engine at version 0 after this node's version 1."""
        manifest = self.store.get_manifest(1)
        receiver = Receiver(tensors(0))
        chunks = {ref.id: self.store.get(ref.id) for ref in manifest.chunks}
        receiver.commit(receiver.decode(manifest, chunks, KEY.verify_key, manifest.created_s))
        return dict(receiver.tensors)


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


class Cluster:
    """`at_boundary` runs once, when so many chunks are whole somewhere."""

    def __init__(self, folder: Path, ports: list[int], rate: float = 4e6) -> None:
        self._loop = asyncio.get_running_loop()
        self.origin = Origin(folder / "origin", ports[0], rate)
        self.members = [
            Member(folder / f"node-{n}", port, self.origin, self._told)
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

    def whole(self) -> set[str]:
        """Chunks that somebody has."""
        names = self.origin.sent
        return {name for name in names if any(m.store.has(name) for m in self.members)}

    async def boundary(self, chunks: int) -> None:
        """Wait until so many chunks are whole somewhere."""
        self._at = chunks
        self._look()
        await self._boundary.wait()

    def relay_of(self, name: str) -> Member:
        return next(m for m in self.members if m.url == order(self.urls, name)[0])

    def _told(self) -> None:
        self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self._at >= 0 and len(self.whole()) >= self._at:
            self._boundary.set()

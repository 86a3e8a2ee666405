"""Serves manifests and chunks of one store: the trainer's, or a node's to its neighbours.

GET /manifests/{version}        signed JSON; `{version}.base` for all of a version
GET /chunks/{blake3}            encoded bytes, `Range: bytes=N-` goes on at byte N
With a hub, what is on its way is served while it arrives. The last bytes wait until the whole was
proved, so that no neighbour ever ends up with a chunk that this node would refuse.
"""

import asyncio
import contextlib
import os
from hmac import compare_digest

from aiohttp import web

from rose.errors import ConfigError
from rose.publish.download import BLOCK_BYTES, Download, FetchError
from rose.publish.hub import Hub
from weight_transfer import ChunkMissingError, ChunkStore

HELD_BACK_BYTES = 1 << 16


class VersionServer:
    """HTTP face of a chunk store.

    hub: of a node that relays. token: what callers must bear, nothing when empty. host: the address
    to listen at.
    corrupt_every: a control for tests and drills. The first answer for every n-th chunk has one bit
    flipped, which receivers must catch and heal by fetching again; 0 serves everything as it is.
    """

    def __init__(
        self,
        store: ChunkStore,
        port: int,
        corrupt_every: int = 0,
        hub: Hub | None = None,
        token: str = "",
        host: str = "127.0.0.1",
    ) -> None:
        self._host = host
        self._store = store
        self._port = port
        self._corrupt_every = corrupt_every
        self._hub = hub
        self._token = token
        self._served: set[str] = set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Bind the port; ConfigError when it is taken."""
        app = web.Application()
        app.router.add_get(r"/manifests/{version:\d{1,18}(\.base)?}", self._manifest)
        app.router.add_get("/chunks/{name:[0-9a-f]{64}}", self._chunk)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"port {self._port} (weights) is busy; choose another for the publisher"
            ) from error

    async def close(self) -> None:
        """Stop serving."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        self._admit(request)
        version, _, base = request.match_info["version"].partition(".")
        path = self._store.manifest_path(int(version), base=bool(base))
        if path.is_file():
            return web.FileResponse(path, headers={"Content-Type": "application/json"})
        raw = await self._hub.known_manifest(request.path.lstrip("/")) if self._hub else None
        if raw is None:
            raise web.HTTPNotFound(text=f"version {request.match_info['version']} is not here")
        return web.Response(body=raw, content_type="application/json")

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        self._admit(request)
        name = request.match_info["name"]
        if not self._store.has(name):
            return await self._relayed(request, name)
        if self._corrupt_every:
            return await self._perhaps_corrupted(name)
        return web.FileResponse(self._store.chunks_dir / name)

    def _admit(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        if self._token and not compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text="bear the token of this cluster")

    async def _relayed(self, request: web.Request, name: str) -> web.StreamResponse:
        """What is not here yet, while it comes."""
        ref = await self._hub.known(name) if self._hub else None
        if self._hub is None or ref is None:
            raise web.HTTPNotFound(text=f"chunk {name} is not here")
        wanted = asyncio.create_task(self._hub.obtain(ref))
        try:
            await asyncio.sleep(0)  # Until the download is known, unless the chunk came meanwhile.
            download = self._hub.download(name)
            if download is None or ref.encoded_bytes <= HELD_BACK_BYTES:
                await wanted
                return web.FileResponse(self._store.chunks_dir / name)
            return await self._stream(request, download, wanted)
        except FetchError as error:
            raise web.HTTPBadGateway(text=str(error)) from error
        finally:
            wanted.cancel()

    async def _stream(
        self, request: web.Request, download: Download, wanted: "asyncio.Task[int]"
    ) -> web.StreamResponse:
        at = request.http_range.start or 0
        size = download.ref.encoded_bytes
        response = web.StreamResponse(status=206 if at else 200)
        response.content_length = size - at
        if at:
            response.headers["Content-Range"] = f"bytes {at}-{size - 1}/{size}"
        await response.prepare(request)
        with contextlib.ExitStack() as stack:
            if await self._pass_on(response, download, wanted, at, stack):
                await response.write_eof()
            elif request.transport:
                # What was sent may be wrong: the caller gets a broken answer, and asks again.
                request.transport.abort()
        return response

    async def _pass_on(
        self,
        response: web.StreamResponse,
        download: Download,
        wanted: "asyncio.Task[int]",
        at: int,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Send a chunk from byte `at` on, as it comes; False when what was sent is not of it."""
        size, restarts = download.ref.encoded_bytes, download.restarts
        reader: int | None = None
        while not download.ended:
            moved = download.moved
            if reader is None and download.here:
                reader = download.reader()
                stack.callback(os.close, reader)
            ready = min(download.here, size - HELD_BACK_BYTES)
            while reader is not None and at < ready:
                block = await asyncio.to_thread(os.pread, reader, min(BLOCK_BYTES, ready - at), at)
                if download.restarts != restarts:
                    return False
                await response.write(block)
                at += len(block)
            if not download.ended:
                await moved.wait()
            if download.restarts != restarts:
                return False
        try:
            await wanted
        except FetchError:
            return False
        with (self._store.chunks_dir / download.ref.id).open("rb") as file:
            while at < size:
                block = await asyncio.to_thread(os.pread, file.fileno(), BLOCK_BYTES, at)
                await response.write(block)
                at += len(block)
        return True

    async def _perhaps_corrupted(self, name: str) -> web.Response:
        body = await asyncio.to_thread(self._body, name)
        first = name not in self._served
        self._served.add(name)
        if first and len(self._served) % self._corrupt_every == 0:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        return web.Response(body=body)

    def _body(self, name: str) -> bytes:
        try:
            return self._store.get(name)
        except ChunkMissingError as error:
            raise web.HTTPNotFound(text=str(error)) from error

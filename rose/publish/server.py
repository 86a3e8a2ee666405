"""Serves manifests and chunks of one store on loopback.

GET /manifests/{version}   signed JSON
GET /chunks/{blake3}       encoded bytes
"""

import asyncio

from aiohttp import web

from rose.errors import ConfigError
from weight_transfer import ChunkMissingError, ChunkStore, StoreError


class VersionServer:
    """HTTP face of a chunk store.

    corrupt_every: a control for tests and drills. The first answer for every n-th chunk has one bit
    flipped, which receivers must catch and heal by fetching again; 0 serves everything as it is.
    """

    def __init__(self, store: ChunkStore, port: int, corrupt_every: int = 0) -> None:
        self._store = store
        self._port = port
        self._corrupt_every = corrupt_every
        self._served: set[str] = set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Bind the port; ConfigError when it is taken."""
        app = web.Application()
        app.router.add_get("/manifests/{version}", self._manifest)
        app.router.add_get("/chunks/{name}", self._chunk)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
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

    async def _manifest(self, request: web.Request) -> web.Response:
        try:
            manifest = self._store.get_manifest(int(request.match_info["version"]))
        except (ValueError, StoreError) as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return web.Response(body=manifest.to_json(), content_type="application/json")

    async def _chunk(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if len(name) != 64 or not name.isalnum():
            raise web.HTTPNotFound(text="a chunk's name is 64 hex digits")
        try:
            body = await asyncio.to_thread(self._store.get, name)
        except ChunkMissingError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return web.Response(body=self._perhaps_corrupted(name, body))

    def _perhaps_corrupted(self, name: str, body: bytes) -> bytes:
        first = name not in self._served
        self._served.add(name)
        if self._corrupt_every and first and len(self._served) % self._corrupt_every == 0:
            middle = len(body) // 2
            return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        return body

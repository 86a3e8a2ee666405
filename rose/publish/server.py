"""Serves manifests and chunks of one store: the trainer's, or a node's to its neighbours.

GET /manifests/{version}        signed JSON; `{version}.base` for all of a version
GET /chunks/{blake3}            encoded bytes, `Range: bytes=N-` goes on at byte N; 202: in line
POST /chunks/{blake3}/doubt     it arrived corrupt: a relay drops a copy that is damaged
GET /catalog                    what is published here (`index`)
POST /leases                    {reader, version, ttl_s}: nothing after `version` is collected
GET /group                      of a fixed group's leader: NCCL's name of the group
POST /group/{what}/{rank}       likewise: "all" once all members came for the same
With a hub, what is on its way is served while it arrives (`passing`).
"""

import asyncio
import json
import time
from hmac import compare_digest

from aiohttp import web

from rose.errors import ConfigError, RefusedError
from rose.publish import index
from rose.publish.credentials import OPEN, Credentials
from rose.publish.hub import Hub
from rose.publish.leases import Leases
from rose.publish.muster import Lead
from rose.publish.passing import Passing
from weight_transfer import ChunkMissingError, ChunkStore, WeightError

MOST_BODY_BYTES = 4_096


class VersionServer:
    """HTTP face of a chunk store.

    hub: of a node that relays. credentials: what callers must show. host: the address to listen at.
    leases: of a publisher that collects. lead: of a node that leads a fixed group of GPUs.
    corrupt_every: a control for tests and drills. The first answer for every n-th chunk has one bit
    flipped, which receivers must catch and heal by fetching again; 0 serves everything as it is.
    """

    def __init__(
        self,
        store: ChunkStore,
        port: int,
        corrupt_every: int = 0,
        hub: Hub | None = None,
        credentials: Credentials = OPEN,
        host: str = "127.0.0.1",
        leases: Leases | None = None,
        lead: Lead | None = None,
    ) -> None:
        self._host = host
        self._store = store
        self._port = port
        self._corrupt_every = corrupt_every
        self._hub = hub
        self._passing = Passing(store, hub) if hub else None
        self._credentials = credentials
        self._leases = leases
        self._lead = lead
        self._served: set[str] = set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base address."""
        return f"{self._credentials.scheme}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Bind the port; ConfigError when it is taken or a certificate cannot be used."""
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.router.add_get(r"/manifests/{version:\d{1,18}(\.base)?}", self._manifest)
        app.router.add_get("/chunks/{name:[0-9a-f]{64}}", self._chunk)
        app.router.add_post("/chunks/{name:[0-9a-f]{64}}/doubt", self._doubt)
        app.router.add_get("/catalog", self._catalog)
        app.router.add_post("/leases", self._lease)
        app.router.add_get("/group", self._group)
        app.router.add_post("/group/{what:[0-9a-f]{64}}/{rank:[0-9]{1,5}}", self._muster)
        context = self._credentials.server()
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, self._host, self._port, ssl_context=context)
            await site.start()
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"{self._host}:{self._port} (weights) cannot be served: {error.strerror};"
                " choose another"
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
            raw: bytes | None = await asyncio.to_thread(path.read_bytes)
        else:
            raw = await self._hub.known_manifest(request.path.lstrip("/")) if self._hub else None
        if raw is None:
            raise web.HTTPNotFound(text=f"version {request.match_info['version']} is not here")
        answer = web.Response(body=raw, content_type="application/json", zlib_executor_size=1 << 16)
        answer.enable_compression()  # Names and digests in hex: a fifth of it is left.
        return answer

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        self._admit(request)
        name = request.match_info["name"]
        if not self._store.has(name):
            if self._passing is None:
                raise web.HTTPNotFound(text=f"chunk {name} is not here")
            return await self._passing.answer(request, name)
        if self._corrupt_every:
            return await self._perhaps_corrupted(name)
        return web.FileResponse(self._store.chunks_dir / name)

    async def _catalog(self, request: web.Request) -> web.Response:
        self._admit(request)
        try:
            catalog = await asyncio.to_thread(self._store.catalog)
        except (WeightError, OSError) as error:
            raise web.HTTPServiceUnavailable(text=f"ask again: {error}") from error
        return web.Response(body=index.written(catalog), content_type="application/json")

    async def _lease(self, request: web.Request) -> web.Response:
        self._admit(request)
        if self._leases is None:
            raise web.HTTPNotFound(text="nothing is collected here; no lease is needed")
        try:
            asked = json.loads(await request.read())
            reader, version, ttl_s = (asked[name] for name in ("reader", "version", "ttl_s"))
            lease = self._leases.take(str(reader), int(version), float(ttl_s), time.monotonic())
        except (ValueError, KeyError, TypeError, RefusedError) as error:
            raise web.HTTPBadRequest(text=f"no lease: {error!r}") from error
        return web.json_response({"ttl_s": lease.expires_s - time.monotonic()})

    async def _group(self, request: web.Request) -> web.Response:
        return web.json_response(self._leading(request).unique_id)

    async def _muster(self, request: web.Request) -> web.Response:
        what, rank = request.match_info["what"], int(request.match_info["rank"])
        came = await self._leading(request).muster.join(what, rank)
        return web.Response(text="all" if came else "not all")

    def _leading(self, request: web.Request) -> Lead:
        self._admit(request)
        if self._lead is None:
            raise web.HTTPNotFound(text="this node leads no group of GPUs")
        return self._lead

    def _admit(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        token = self._credentials.token
        if token and not compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(text="bear the token of this cluster")

    async def _perhaps_corrupted(self, name: str) -> web.Response:
        body = await asyncio.to_thread(self._body, name)
        first = name not in self._served
        self._served.add(name)
        if first and len(self._served) % self._corrupt_every == 0:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        return web.Response(body=body)

    async def _doubt(self, request: web.Request) -> web.Response:
        self._admit(request)
        if self._hub:  # A relay fetches it again; a publisher has nowhere to fetch it from.
            await asyncio.to_thread(self._store.mend, request.match_info["name"])
        return web.Response(status=204)

    def _body(self, name: str) -> bytes:
        try:
            return self._store.get(name)
        except ChunkMissingError as error:
            raise web.HTTPNotFound(text=str(error)) from error

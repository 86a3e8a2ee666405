"""Serves manifests and chunks of one store: the trainer's, or a node's to its neighbours.

GET /manifests/{version}        a signed manifest; `{version}.base` for all of a version
GET /chunks/{blake3}            encoded bytes, `Range: bytes=N-` goes on at byte N; 202: in line
POST /chunks/{blake3}/doubt     it arrived corrupt: a relay drops a copy that is damaged
GET /catalog                    what is published here, signed (`index`); of a publisher
POST /leases                    {reader, version, ttl_s}: nothing after `version` is collected
GET /group                      of a fixed group's leader: NCCL's name of the group
POST /group/{what}/{rank}       likewise: "all" once all members came for the same
With a hub, what is on its way is served while it arrives (`passing`).
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError
from msgspec import Struct

from rose.errors import ConfigError, RefusedError
from rose.publish import index
from rose.publish.credentials import OPEN, Credentials
from rose.publish.hub import Hub
from rose.publish.leases import Leases
from rose.publish.muster import Lead
from rose.publish.passing import Passing
from weight_transfer import ChunkMissingError, ChunkStore, SigningKey, WeightError
from weight_transfer.manifest import MALFORMED, Count, expiry_of

MOST_BODY_BYTES = 4_096

_log = logging.getLogger(__name__)
# Answered with 400. A traceback for each would let strangers fill the log.
_log.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)


@dataclass(frozen=True, slots=True)
class Signer:
    """What a publisher vouches for its catalog with: the key of the job's manifests."""

    job: str
    key: SigningKey


class _Asked(Struct, frozen=True):
    """A lease that is asked for."""

    reader: str
    version: Count
    ttl_s: float


_read_asked = msgspec.json.Decoder(_Asked).decode


class VersionServer:
    """HTTP face of a chunk store.

    hub: of a node that relays. credentials: what callers must show. host: the address to listen at.
    leases: of a publisher that collects. lead: of a node that leads a fixed group of GPUs.
    signer: of a publisher; nobody else has a catalog.
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
        signer: Signer | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        """`insecure`: other machines may reach it without certificates. ConfigError without."""
        credentials.check_exposure(host, insecure=insecure)
        self._host = host
        self._store = store
        self._port = port
        self._corrupt_every = corrupt_every
        self._hub = hub
        self._passing = Passing(store, hub) if hub else None
        self._credentials = credentials
        self._leases = leases
        self._lead = lead
        self._signer = signer
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
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, logger=_log)
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
        raw: bytes | bytearray | None = await asyncio.to_thread(_bytes_of, path)
        if self._hub and (raw is None or _expired(raw)):
            # One that expired may have been signed anew.
            raw = await self._hub.known_manifest(request.path.lstrip("/")) or raw
        if raw is None:
            raise web.HTTPNotFound(text=f"version {request.match_info['version']} is not here")
        answer = web.Response(
            body=raw, content_type="application/octet-stream", zlib_executor_size=1 << 16
        )
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
        signer = self._signer
        if signer is None:
            raise web.HTTPNotFound(text="no publisher, so no catalog; ask the job's trainer")
        try:
            catalog = await asyncio.to_thread(self._store.catalog)
        except (WeightError, OSError) as error:
            raise web.HTTPServiceUnavailable(text=f"ask again: {error}") from error
        raw = index.written(catalog, signer.job, signer.key, time.time())
        return web.Response(body=raw, content_type="application/octet-stream")

    async def _lease(self, request: web.Request) -> web.Response:
        self._admit(request)
        if self._leases is None:
            raise web.HTTPNotFound(text="nothing is collected here; no lease is needed")
        now_s = time.monotonic()
        try:
            asked = _read_asked(await request.read())
            # An address is all that tells callers apart, and never empty: that is the publisher.
            peer = request.remote or "unknown"
            lease = self._leases.take(asked.reader, asked.version, asked.ttl_s, now_s, peer)
        except (*MALFORMED, RefusedError) as error:
            raise web.HTTPBadRequest(text=f"no lease: {error!s:.200}") from error
        return web.json_response({"ttl_s": lease.expires_s - now_s})

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
        # Bytes that are no UTF-8 come as surrogates, which are to be compared as well.
        shown = given.encode("utf-8", "surrogateescape")
        if token and not compare_digest(shown, f"Bearer {token}".encode()):
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


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _expired(raw: bytes | bytearray) -> bool:
    try:
        return time.time() >= expiry_of(raw)
    except WeightError:
        return True

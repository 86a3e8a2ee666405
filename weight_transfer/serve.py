"""HTTP routes of manifests and chunks: the trainer's, or a node's for its neighbours.

GET /manifests/{version}        signed manifest of a delta, `{version}.base` of a base; `?job=`
                                names the job, since versions of two jobs have the same numbers
GET /chunks/{blake3}            encoded bytes, `Range: bytes=N-` goes on at byte N; 202: in line
POST /chunks                    [blake3, …] of small chunks that are stored: their encoded bytes,
                                one after the other
POST /chunks/{blake3}/doubt     the chunk arrived corrupt: a relay drops a damaged copy, a publisher
                                drops the versions that need it too
GET /catalog                    all published versions, signed (`publisher_client`); of a publisher
POST /leases                    {reader, version, ttl_s}: nothing after `version` is deleted
GET /group                      from the leader of a fixed group of GPUs: NCCL's id of the group
POST /group/{what}/{rank}       likewise, a barrier: "all" once all members came for a version

A node forwards a chunk that is still arriving: a relay passes each part on as it comes. The last
bytes wait until the whole was proved, so that no neighbour ever ends up with a chunk that this node
would refuse. While the chunk waits for its turn on the slow link the caller gets 202.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Self
from urllib.parse import unquote

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Handler

from weight_transfer.catalog import ReadLeases
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import ReadLeaseError, TransferError, WeightError
from weight_transfer.fetch.download import BLOCK_BYTES, HELD, JOB, MANIFEST, Download
from weight_transfer.fetch.fetcher import MOST_TOGETHER, SMALL_BYTES, ChunkFetcher
from weight_transfer.fetch.limits import Asked, Traffic
from weight_transfer.fetch.nccl import GROUP, GroupLead
from weight_transfer.fetch.publisher_client import (
    CATALOG,
    LEASES,
    MOST_BODY_BYTES,
    LeaseBody,
    LeaseGranted,
    encode_catalog,
)
from weight_transfer.format.manifest import MALFORMED, ChunkRef, head_of
from weight_transfer.format.signing import SigningKey
from weight_transfer.publish.level import LinkMeter

_ASKED = {"chunks": Asked.CHUNK, "manifests": Asked.MANIFEST}
HELD_BACK_BYTES = 1 << 16
# Seconds after which a caller gets 202 while its chunk waits for its turn on the slow link.
IN_LINE_S = 2.0


@dataclass(frozen=True, slots=True)
class Signer:
    """Job name and signing key with which a publisher signs its catalog."""

    job: str
    key: SigningKey


_Name = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Names = Annotated[list[_Name], msgspec.Meta(max_length=MOST_TOGETHER)]
_read_names = msgspec.json.Decoder(_Names).decode
_read_asked = msgspec.json.Decoder(LeaseBody).decode


class VersionRoutes:
    """HTTP routes that serve a chunk store's manifests and chunks.

    fetcher: given for a node that relays chunks it does not have yet. leases: given for a publisher
    that deletes old versions. lead: given for the leader of a fixed group of GPUs. signer: given
    for a publisher; without it there is no catalog.
    """

    def __init__(
        self,
        store: ChunkStore,
        admit: Callable[[web.Request], None],
        fetcher: ChunkFetcher | None = None,
        leases: ReadLeases | None = None,
        lead: GroupLead | None = None,
        signer: Signer | None = None,
    ) -> None:
        """Prepare routes; `admit` raises a web.HTTPException for a caller that may not read."""
        self._store = store
        self._admit = admit
        self._fetcher = fetcher
        # A relay counts both directions in one place; a publisher only sends.
        self._traffic = fetcher.receiving.traffic if fetcher else Traffic()
        self._forwarder = ChunkForwarder(store, fetcher, self._stored) if fetcher else None
        self._leases = leases
        self._lead = lead
        self._signer = signer
        self._meter = LinkMeter()

    @property
    def link_bytes_s(self) -> float | None:
        """Bytes a second at which readers take stored chunks, a median of peers.

        None until measured.
        """
        return self._meter.bytes_per_s(time.monotonic())

    def app(self) -> web.Application:
        """Return a new aiohttp application that serves manifests, chunks, catalog, leases and
        group."""
        app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=(self._counted,))
        app.router.add_get(
            r"/manifests/{version:\d{1,18}(\.base)?}", self._manifest, allow_head=False
        )
        app.router.add_get("/chunks/{name:[0-9a-f]{64}}", self._chunk, allow_head=False)
        app.router.add_post("/chunks", self._chunks)
        app.router.add_post("/chunks/{name:[0-9a-f]{64}}/doubt", self._doubt)
        app.router.add_get(CATALOG, self._catalog)
        app.router.add_post(LEASES, self._lease)
        app.router.add_get(GROUP, self._group)
        app.router.add_post("/group/{what:[0-9a-f]{64}}/{rank:[0-9]{1,5}}", self._barrier)
        return app

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request, and count the reply by its status if a chunk or manifest was
        requested."""
        asked = _ASKED.get(request.path.split("/", 2)[1])
        if asked is None:
            return await handler(request)
        peer = request.remote or "unknown"
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            self._traffic.answered(asked, error.status, peer)
            raise
        except Exception:
            self._traffic.answered(asked, web.HTTPInternalServerError.status_code, peer)
            raise
        self._traffic.answered(asked, answer.status, peer)
        return answer

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        self._admit(request)
        version, _, base = request.match_info["version"].partition(".")
        job = request.query.get("job", "")
        stored = partial(self._store.manifest_bytes, job, int(version), base=bool(base))
        raw: bytes | bytearray | None = await asyncio.to_thread(stored)
        if self._fetcher and (raw is None or _expired(raw)):
            # An expired manifest may have been signed anew.
            raw = await self._fetcher.known_manifest(request.path.lstrip("/"), job) or raw
        if raw is None:
            of = f" of job {job[:80]!r}" if job else ""
            raise web.HTTPNotFound(text=f"version {request.match_info['version']}{of} is not here")
        answer = web.Response(
            body=raw, content_type="application/octet-stream", zlib_executor_size=1 << 16
        )
        answer.enable_compression()  # Names and digests in hex: a fifth of it is left.
        return answer

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        self._admit(request)
        name = request.match_info["name"]
        if not self._store.has(name):
            if self._forwarder is None:
                raise web.HTTPNotFound(text=f"chunk {name} is not here")
            return await self._forwarder.answer(request, name)
        return await self._stored(name)

    async def _chunks(self, request: web.Request) -> web.Response:
        self._admit(request)
        try:
            names = _read_names(await request.read())
        except MALFORMED as error:
            raise web.HTTPBadRequest(text=f"no names of chunks: {error!s:.200}") from error
        body = await asyncio.to_thread(self._together, names)
        if body is None:
            raise web.HTTPNotFound(text="not all of these chunks are here, and small")
        answer = _ChunksReply(body=body, content_type="application/octet-stream")
        return answer.counted_by(self._meter, self._traffic)

    def _together(self, names: list[str]) -> bytes | None:
        """Return the bytes of these chunks, None unless all are there and small."""
        paths = [self._store.chunks_dir / name for name in names]
        with contextlib.suppress(FileNotFoundError):
            if all(path.stat().st_size <= SMALL_BYTES for path in paths):
                return b"".join(path.read_bytes() for path in paths)
        return None

    async def _stored(self, name: str) -> web.StreamResponse:
        answer = _ChunkReply(self._store.chunks_dir / name)
        return answer.counted_by(self._meter, self._traffic)

    async def _catalog(self, request: web.Request) -> web.Response:
        self._admit(request)
        signer = self._signer
        if signer is None:
            raise web.HTTPNotFound(text="no publisher, so no catalog; ask the job's trainer")
        try:
            catalog = await asyncio.to_thread(self._store.catalog)
        except (WeightError, OSError) as error:
            raise web.HTTPServiceUnavailable(text=f"ask again: {error}") from error
        raw = encode_catalog(catalog, signer.job, signer.key, time.time())
        return web.Response(body=raw, content_type="application/octet-stream")

    async def _lease(self, request: web.Request) -> web.Response:
        self._admit(request)
        if self._leases is None:
            raise web.HTTPNotFound(text="nothing is collected here; no lease is needed")
        now_s = time.monotonic()
        try:
            asked = _read_asked(await request.read())
            # Callers are told apart by address alone; the empty one is the publisher's own.
            peer = request.remote or "unknown"
            lease = self._leases.take(asked.reader, asked.version, asked.ttl_s, now_s, peer)
        except (*MALFORMED, ReadLeaseError) as error:
            raise web.HTTPBadRequest(text=f"no lease: {error!s:.200}") from error
        granted = msgspec.json.encode(LeaseGranted(lease.expires_s - now_s))
        return web.Response(body=granted, content_type="application/json")

    async def _group(self, request: web.Request) -> web.Response:
        return web.json_response(self._leading(request).unique_id)

    async def _barrier(self, request: web.Request) -> web.Response:
        what, rank = request.match_info["what"], int(request.match_info["rank"])
        joined = await self._leading(request).barrier.join(what, rank)
        return web.Response(text="all" if joined else "not all")

    def _leading(self, request: web.Request) -> GroupLead:
        self._admit(request)
        if self._lead is None:
            raise web.HTTPNotFound(text="this node leads no group of GPUs")
        return self._lead

    async def _doubt(self, request: web.Request) -> web.Response:
        self._admit(request)
        # A relay fetches the chunk again; a publisher cannot, and drops the versions that need it.
        check = self._store.mend if self._fetcher else self._store.drop
        name = request.match_info["name"]
        if self._store.has(name):
            await asyncio.to_thread(check, name)
        return web.Response(status=204)


class _Metered(web.StreamResponse):
    """Reply that is sent whole by `prepare`, its bytes and duration recorded in the link meter."""

    _meter: LinkMeter
    _traffic: Traffic

    def counted_by(self, meter: LinkMeter, traffic: Traffic) -> Self:
        self._meter, self._traffic = meter, traffic
        return self

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        peer, size = request.remote or "unknown", 0
        self._meter.began(peer, time.monotonic())
        try:
            writer = await super().prepare(request)
            await self.write_eof()
            size = self.content_length or 0
            return writer
        finally:
            self._traffic.served_bytes += size
            self._meter.ended(peer, size, time.monotonic())


class _ChunkReply(_Metered, web.FileResponse):
    """Reply with a chunk's file."""


class _ChunksReply(_Metered, web.Response):
    """Reply with the bytes of small chunks."""


def _expired(raw: bytes | bytearray) -> bool:
    try:
        return time.time() >= head_of(raw).expires_s
    except WeightError:
        return True


class ChunkForwarder:
    """Forwarder of chunks that are not in the store yet: it fetches them for the caller of a
    server."""

    def __init__(
        self,
        store: ChunkStore,
        fetcher: ChunkFetcher,
        stored: Callable[[str], Awaitable[web.StreamResponse]],
    ) -> None:
        """Prepare a forwarder.

        `stored` returns the reply that sends a stored chunk's file, by name.
        """
        self._store = store
        self._fetcher = fetcher
        self._stored = stored

    async def answer(self, request: web.Request, name: str) -> web.StreamResponse:
        """Fetch a chunk if needed, and return a reply that sends it while it is being received.

        The reply is HTTP 202 while the chunk waits for its turn on the slow link. Raises HTTP
        errors: 404 for a chunk that no known manifest names, 409 when another node should be asked,
        502 when it cannot be fetched.
        """
        download = self._fetcher.download(name)
        if HELD in request.headers and not (download and download.from_origin):
            raise web.HTTPConflict(text=f"chunk {name} is not held here")
        manifest, job = request.headers.get(MANIFEST, ""), unquote(request.headers.get(JOB, ""))
        ref = await self._fetcher.known(name, manifest, job)
        if ref is None:
            raise web.HTTPNotFound(text=f"chunk {name} is not here")
        wanted = asyncio.create_task(self._fetcher.obtain(ref))
        try:
            download = await self._begun(ref, wanted)
            if wanted.done():
                wanted.result()
                return await self._stored(name)
            if download and download.from_holder:
                raise web.HTTPConflict(text=f"chunk {name} comes from a neighbour; ask that one")
            if download is None:
                return web.Response(status=202, text="in line; ask again")
            return await self._stream(request, download, wanted)
        except TransferError as error:
            raise web.HTTPBadGateway(text=str(error)) from error
        finally:
            wanted.cancel()

    async def _begun(self, ref: ChunkRef, wanted: asyncio.Task[int]) -> Download | None:
        """Return the running download once it has bytes to pass on, None after IN_LINE_S without
        any.

        None, too, once the chunk is in the store or its fetch has failed.
        """
        until_s = time.monotonic() + IN_LINE_S
        while not wanted.done() and (left_s := until_s - time.monotonic()) > 0:
            download = self._fetcher.download(ref.id)
            if download and download.here and ref.encoded_bytes > HELD_BACK_BYTES:
                return download
            moved = asyncio.ensure_future(download.moved.wait() if download else asyncio.sleep(0))
            await asyncio.wait((wanted, moved), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
        return None

    async def _stream(
        self, request: web.Request, download: Download, wanted: asyncio.Task[int]
    ) -> web.StreamResponse:
        size = download.ref.encoded_bytes
        at = _first_byte(request, size)
        response = web.StreamResponse(status=206 if at else 200)
        response.content_length = size - at
        if at:
            response.headers["Content-Range"] = f"bytes {at}-{size - 1}/{size}"
        await response.prepare(request)
        with contextlib.ExitStack() as stack:
            try:
                if await self._pass_on(response, download, wanted, at, stack):
                    await response.write_eof()
                    return response
            except ConnectionError:
                return response  # The caller left; the download goes on for the next one.
        if request.transport:
            # The sent bytes may be wrong: break the reply off, so that the caller asks again.
            request.transport.abort()
        return response

    async def _pass_on(
        self,
        response: web.StreamResponse,
        download: Download,
        wanted: asyncio.Task[int],
        at: int,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Send a chunk from byte `at` on while it arrives; return True once all of it is sent.

        Return False when bytes that were sent proved wrong, or the download failed. The last
        HELD_BACK_BYTES are sent only after the whole chunk is verified.
        """
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
                await self._write(response, block)
                at += len(block)
            if not download.ended:
                await moved.wait()
            if download.restarts != restarts:
                return False
        try:
            await wanted
        except TransferError:
            return False
        with (self._store.chunks_dir / download.ref.id).open("rb") as file:
            while at < size:
                block = await asyncio.to_thread(os.pread, file.fileno(), BLOCK_BYTES, at)
                await self._write(response, block)
                at += len(block)
        return True

    async def _write(self, response: web.StreamResponse, block: bytes) -> None:
        await response.write(block)
        self._fetcher.receiving.traffic.served_bytes += len(block)


def _first_byte(request: web.Request, size: int) -> int:
    """Return N of the header `Range: bytes=N-`, 0 without one.

    Raises HTTP 416 for any other range.
    """
    try:
        asked = request.http_range
    except ValueError as error:
        raise web.HTTPRequestRangeNotSatisfiable(text="ask for bytes=N-") from error
    at = asked.start or 0
    if asked.stop is not None or not 0 <= at < size:
        raise web.HTTPRequestRangeNotSatisfiable(text=f"ask for bytes=N- of {size}")
    return at

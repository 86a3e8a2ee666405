"""HTTP server of manifests and chunks: the trainer's, or a node's for its neighbours.

GET /manifests/{version}        a signed manifest; `{version}.base` for all of a version, `?job=` of
                                that job: versions of two jobs have the same numbers
GET /chunks/{blake3}            encoded bytes, `Range: bytes=N-` goes on at byte N; 202: in line
POST /chunks/{blake3}/doubt     it arrived corrupt: a relay drops a copy that is damaged, a
                                publisher drops the versions it is of too
GET /catalog                    all published versions, signed (`publisher_client`); of a publisher
POST /leases                    {reader, version, ttl_s}: nothing after `version` is collected
GET /group                      of a fixed group's leader: NCCL's name of the group
POST /group/{what}/{rank}       likewise: "all" once all members came for the same

With a fetcher, chunks that are still arriving are served on (`forwarding`).

`ReadLeases` bounds the leases of readers. Anybody may ask, so there is a bound for each peer (an
address) and one for all. Where one is reached the lease that was renewed longest ago gives way: of
the peer itself, or of the peer that holds most. A reader renews every third of its lease, so a
lease that a flood took comes back, and no peer can take the place of another.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from math import isfinite
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Handler

from rose.addresses import PATIENCE_S, host_port
from rose.contract.weights import (
    CATALOG,
    GROUP,
    LEASES,
    LONGEST_TTL_S,
    MOST_BODY_BYTES,
    MOST_READER_CHARS,
    LeaseBody,
    LeaseGranted,
)
from rose.errors import ConfigError, RefusedError
from rose.process.http_port import HttpPort
from rose.security.certificates import peer_over
from rose.security.roles import WEIGHT_READERS
from rose.weight_distribution.credentials import OPEN, Credentials
from rose.weight_distribution.fetch import publisher_client
from rose.weight_distribution.fetch.fetcher import ChunkFetcher
from rose.weight_distribution.forwarding import ChunkForwarder
from rose.weight_distribution.level import LinkMeter
from rose.weight_distribution.nccl import Lead
from rose.weight_distribution.traffic import Asked, Traffic
from weight_transfer import ChunkStore, SigningKey, WeightError
from weight_transfer.format.manifest import MALFORMED, expiry_of
from weight_transfer.store.catalog import ReaderPin

MOST_READERS = 4_096
MOST_OF_A_PEER = 256
_SWEEP_EVERY_S = 1.0
OWN = ""
"""The publisher itself: nobody takes from it."""


class ReadLeases:
    """By reader; each is at a version and may ask for anything after it. The clock is handed in.

    began_s: when the publisher began. It knows nothing of the leases of its earlier life, which
    their readers renew within LONGEST_TTL_S.
    """

    def __init__(self, began_s: float) -> None:
        self._by_peer: dict[str, OrderedDict[str, ReaderPin]] = {}
        self._settled_s = began_s + LONGEST_TTL_S
        self._swept_s = began_s

    def settled(self, now_s: float) -> bool:
        """Return True once every lease of an earlier process was renewed or has expired."""
        return now_s >= self._settled_s

    def take(
        self, reader: str, version: int, ttl_s: float, now_s: float, peer: str = OWN
    ) -> ReaderPin:
        """Take or renew; a reader of a peer has one lease. Raises RefusedError."""
        named = 0 < len(reader) <= MOST_READER_CHARS
        if not named or version < 0 or not isfinite(ttl_s) or ttl_s <= 0:
            raise RefusedError("a lease needs a reader, a version and a ttl_s above 0")
        if peer != OWN and reader not in self._by_peer.get(peer, ()):
            self._make_room(peer, now_s)
        held = self._by_peer.setdefault(peer, OrderedDict())
        lease = ReaderPin(reader, version, now_s + min(ttl_s, LONGEST_TTL_S))
        held[reader] = lease
        held.move_to_end(reader)
        return lease

    def live(self, now_s: float) -> list[ReaderPin]:
        """Return the leases that have not expired."""
        for peer, held in list(self._by_peer.items()):
            for reader in [r for r, each in held.items() if each.expires_s <= now_s]:
                del held[reader]
            if not held:
                del self._by_peer[peer]
        return [lease for held in self._by_peer.values() for lease in held.values()]

    def _make_room(self, peer: str, now_s: float) -> None:
        if len(self._by_peer.get(peer, ())) >= MOST_OF_A_PEER:
            self._by_peer[peer].popitem(last=False)
        elif self._others() >= MOST_READERS:
            if now_s >= self._swept_s + _SWEEP_EVERY_S:
                self._swept_s = now_s
                self.live(now_s)
            if self._others() >= MOST_READERS:
                peers = (name for name in self._by_peer if name != OWN)
                most = max(peers, key=lambda name: len(self._by_peer[name]))
                self._by_peer[most].popitem(last=False)

    def _others(self) -> int:
        return sum(len(held) for peer, held in self._by_peer.items() if peer != OWN)


# Readers in the midst of a chunk may finish it.
SHUTDOWN_S = 60.0


@dataclass(frozen=True, slots=True)
class Signer:
    """Key of the job's manifests, with which a publisher signs its catalog."""

    job: str
    key: SigningKey


_ASKED = {"chunks": Asked.CHUNK, "manifests": Asked.MANIFEST}
_read_asked = msgspec.json.Decoder(LeaseBody).decode


class VersionServer:
    """HTTP face of a chunk store.

    fetcher: of a node that relays. credentials: what callers must show. host: the address to
    listen at. leases: of a publisher that collects. lead: of a node that leads a fixed group of
    GPUs. signer: of a publisher; nobody else has a catalog.
    """

    def __init__(
        self,
        store: ChunkStore,
        port: int,
        fetcher: ChunkFetcher | None = None,
        credentials: Credentials = OPEN,
        host: str = "127.0.0.1",
        leases: ReadLeases | None = None,
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
        self._fetcher = fetcher
        # A relay counts both directions in one place; a publisher only sends.
        self._traffic = fetcher.receiving.traffic if fetcher else Traffic()
        self._forwarder = ChunkForwarder(store, fetcher, self._stored) if fetcher else None
        self._credentials = credentials
        self._leases = leases
        self._lead = lead
        self._signer = signer
        self._meter = LinkMeter()
        self._listening: HttpPort | None = None

    @property
    def url(self) -> str:
        """Base address."""
        return f"{self._credentials.scheme}://{host_port(self._host, self._port)}"

    @property
    def link_bytes_s(self) -> float | None:
        """Rate at which readers take stored chunks; None until one is measured."""
        return self._meter.bytes_per_s(time.monotonic())

    async def start(self) -> None:
        """Bind the port; ConfigError when it stays taken or a certificate cannot be used."""
        app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=(self._counted,))
        app.router.add_get(r"/manifests/{version:\d{1,18}(\.base)?}", self._manifest)
        app.router.add_get("/chunks/{name:[0-9a-f]{64}}", self._chunk)
        app.router.add_post("/chunks/{name:[0-9a-f]{64}}/doubt", self._doubt)
        app.router.add_get(CATALOG, self._catalog)
        app.router.add_post(LEASES, self._lease)
        app.router.add_get(GROUP, self._group)
        app.router.add_post("/group/{what:[0-9a-f]{64}}/{rank:[0-9]{1,5}}", self._barrier)
        context = self._credentials.server()
        port = HttpPort(
            app, self._host, self._port, context, patience_s=PATIENCE_S, shutdown_s=60.0
        )
        try:
            await port.start()
        except OSError as error:
            raise ConfigError(
                f"{host_port(self._host, self._port)} (weights) cannot be served: {error.strerror};"
                " choose another"
            ) from error
        self._listening = port

    async def close(self) -> None:
        """Stop serving."""
        if self._listening:
            await self._listening.close()
            self._listening = None

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer, and note how chunks and manifests were answered."""
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
            # One that expired may have been signed anew.
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

    async def _stored(self, name: str) -> web.StreamResponse:
        return _MeteredFile(self._store.chunks_dir / name, self._meter, self._traffic)

    async def _catalog(self, request: web.Request) -> web.Response:
        self._admit(request)
        signer = self._signer
        if signer is None:
            raise web.HTTPNotFound(text="no publisher, so no catalog; ask the job's trainer")
        try:
            catalog = await asyncio.to_thread(self._store.catalog)
        except (WeightError, OSError) as error:
            raise web.HTTPServiceUnavailable(text=f"ask again: {error}") from error
        raw = publisher_client.written(catalog, signer.job, signer.key, time.time())
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
        granted = msgspec.json.encode(LeaseGranted(lease.expires_s - now_s))
        return web.Response(body=granted, content_type="application/json")

    async def _group(self, request: web.Request) -> web.Response:
        return web.json_response(self._leading(request).unique_id)

    async def _barrier(self, request: web.Request) -> web.Response:
        what, rank = request.match_info["what"], int(request.match_info["rank"])
        came = await self._leading(request).barrier.join(what, rank)
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
        # The CA has signed the certificate; in clusters without roles it names none.
        with contextlib.suppress(ConfigError):
            peer = peer_over(request.transport)
            if peer is not None and peer.identity.role not in WEIGHT_READERS:
                raise web.HTTPForbidden(text=f"{peer.identity} has no use for weights")

    async def _doubt(self, request: web.Request) -> web.Response:
        self._admit(request)
        # A relay fetches the chunk again; a publisher, which cannot, drops the versions it is of.
        check = self._store.mend if self._fetcher else self._store.drop
        name = request.match_info["name"]
        if self._store.has(name):
            await asyncio.to_thread(check, name)
        return web.Response(status=204)


class _MeteredFile(web.FileResponse):
    """A file whose way to its reader is measured: it is sent while the answer is prepared."""

    def __init__(self, path: Path, meter: LinkMeter, traffic: Traffic) -> None:
        super().__init__(path)
        self._meter = meter
        self._traffic = traffic

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        peer, size = request.remote or "unknown", 0
        self._meter.began(peer, time.monotonic())
        try:
            writer = await super().prepare(request)
            size = self.content_length or 0
            return writer
        finally:
            self._traffic.served_bytes += size
            self._meter.ended(peer, size, time.monotonic())


def _expired(raw: bytes | bytearray) -> bool:
    try:
        return time.time() >= expiry_of(raw)
    except WeightError:
        return True

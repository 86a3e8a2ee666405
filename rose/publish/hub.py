"""All that one node fetches: each object once, for its own replicas and for its neighbours.

    origin ══slow link══► relay of the chunk ──► its neighbours
Who relays what follows from the names alone (`rendezvous`). A member asks those before it in that
order, and the origin when there are none or none of them answers: so each object crosses the slow
link once, and what a dead relay had not finished crosses it through the next one.
"""

import asyncio
import contextlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import aiohttp

from rose.errors import RoseError
from rose.publish.download import (
    ATTEMPTS_PER_SOURCE,
    RETRY_PAUSE_S,
    SILENCE_TIMEOUT_S,
    Download,
    FetchError,
    SourceError,
)
from rose.publish.group import FixedGroup
from rose.publish.receiving import Receiving
from rose.publish.route import Route
from rose.publish.standing import Standing
from weight_transfer import ChunkRef, Manifest, VerifyKey, WeightError

# Over the slow link at once; held by nobody who waits for a neighbour, or two could wait for ever.
PARALLEL_CHUNKS = 4
# Versions whose chunks a neighbour may still ask for before they are here.
KNOWN_VERSIONS = 32
MAX_MANIFEST_BYTES = 64 << 20
# How long a neighbour that asks early waits until this node knows what it asks for.
KNOWN_WITHIN_S = 2.0
_MANIFEST = re.compile(r"manifests/(\d{1,18})(\.base)?")


def nobody_told(_: str) -> None:
    """Nobody hears of chunks that arrived corrupt."""


@dataclass(frozen=True, slots=True)
class _Known:
    raw: bytes
    origin: str
    origins: tuple[str, ...]
    chunks: tuple[ChunkRef, ...]
    expires_s: float


@dataclass(frozen=True, slots=True)
class _Where:
    ref: ChunkRef
    origin: str
    path: str


class Hub:
    """Objects on their way to one node.

    `me`: how the other members know this one, empty for a node that relays nothing.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        receiving: Receiving,
        me: str = "",
        members: Iterable[str] = (),
    ) -> None:
        self._session = session
        self._receiving = receiving
        self._me = me
        self._members = frozenset(members)
        self._standing = Standing()
        self._gate = asyncio.Semaphore(PARALLEL_CHUNKS)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._downloads: dict[str, Download] = {}
        self._origins: dict[str, _Where] = {}
        self._following: tuple[str, str, VerifyKey | None] | None = None
        self._manifests: OrderedDict[str, _Known] = OrderedDict()
        self._learned = asyncio.Event()
        self.group: FixedGroup | None = None
        """GPUs that hand chunks to each other; None where neighbours share over HTTP alone."""

    @property
    def receiving(self) -> Receiving:
        """Where objects are stored, and what that may cost."""
        return self._receiving

    def enrol(self, members: Iterable[str]) -> None:
        """From now on these are the members of the cluster, this node among them or not."""
        self._members = frozenset(members)

    def route(self, name: str, origin: str) -> Route:
        """Whom to ask for an object."""
        return Route.of(name, self._me, self._members, origin)

    def download(self, name: str) -> Download | None:
        """A chunk that is on its way."""
        return self._downloads.get(name)

    async def manifest(
        self,
        job: str,
        version: int,
        origin: str,
        verify_key: VerifyKey | None,
        *,
        base: bool = False,
    ) -> tuple[Manifest, int]:
        """A version's manifest, checked, and the bytes that it took."""
        path = f"manifests/{version}{'.base' if base else ''}"
        route = self.route(f"{job}/{path}", origin)
        async with self._locks.setdefault(path, asyncio.Lock()):
            known = self._fresh(path)
            if known and known.origin == origin:
                return Manifest.from_json(known.raw), 0
            raw = await self._object(path, [*route.before, origin])
            manifest = self._checked(raw, job, version, verify_key)
            self._learn(path, raw, manifest, origin)
        return manifest, len(raw)

    def _fresh(self, path: str) -> _Known | None:
        # One that expired may have been signed anew.
        known = self._manifests.get(path)
        return known if known and time.time() < known.expires_s else None

    def _checked(
        self, raw: bytes, job: str, version: int, verify_key: VerifyKey | None
    ) -> Manifest:
        manifest = Manifest.from_json(raw)
        if verify_key is not None:
            manifest.verify(verify_key)
        if (manifest.job, manifest.version) != (job, version):
            raise FetchError(
                f"asked for version {version} of {job}, was given {manifest.version} of"
                f" {manifest.job}"
            )
        return manifest

    async def obtain(self, ref: ChunkRef, on_reject: Callable[[str], None] = nobody_told) -> int:
        """Have a chunk of a known manifest in the store; returns the bytes that came for it.

        However many ask, it is fetched once; they all get the FetchError of a failed one.
        """
        task = self._tasks.get(ref.id)
        mine = task is None
        if task is None:
            task = asyncio.create_task(self._fetch(ref, on_reject))
            self._tasks[ref.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(ref.id, None))
        # One waiter that is cancelled takes nothing from the others.
        received: int = await asyncio.shield(task)
        return received if mine else 0

    def follow(self, job: str, origin: str, verify_key: VerifyKey | None) -> None:
        """From now on what neighbours ask for and is not known here is fetched from there."""
        self._following = job, origin, verify_key

    async def known(self, name: str, path: str = "") -> ChunkRef | None:
        """A chunk of a manifest that this node has, waited for shortly. `path`: of the manifest."""
        if name not in self._origins and path:
            await self.known_manifest(path)
        else:
            await self._learns(lambda: name in self._origins)
        return self._origins[name].ref if name in self._origins else None

    async def known_manifest(self, path: str) -> bytes | None:
        """A manifest that this node has, or gets: for a neighbour's sake, or waited for shortly."""
        named = _MANIFEST.fullmatch(path)
        if self._fresh(path) is None and self._following and named:
            job, origin, key = self._following
            with contextlib.suppress(RoseError, WeightError):
                await self.manifest(job, int(named[1]), origin, key, base=bool(named[2]))
        else:
            await self._learns(lambda: path in self._manifests)
        return self._manifests[path].raw if path in self._manifests else None

    async def close(self) -> None:
        """Stop all downloads; what came of them stays."""
        if self.group is not None:
            self.group.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, ref: ChunkRef, on_reject: Callable[[str], None]) -> int:
        store = self._receiving.store
        if await self._receiving.work(partial(store.has, ref.id)):
            return 0
        where = self._origins[ref.id]
        download = Download(ref, self._receiving, self._standing, on_reject, where.path)
        self._downloads[ref.id] = download
        try:
            route = self.route(ref.id, where.origin)
            await download.run(self._session, route, lambda s: self._gate_of(s, where.origin))
        finally:
            del self._downloads[ref.id]
        return download.received

    async def _object(self, path: str, sources: list[str]) -> bytes:
        failure: Exception | None = None
        timeout = aiohttp.ClientTimeout(None, sock_connect=3.0, sock_read=SILENCE_TIMEOUT_S)
        for attempt in range(ATTEMPTS_PER_SOURCE):
            for source in self._standing.ordered(sources, time.monotonic()):
                try:
                    return await self._whole(f"{source}/{path}", timeout)
                except (SourceError, aiohttp.ClientError, TimeoutError) as error:
                    failure = error
                self._standing.failed(source, time.monotonic())
            await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
        raise FetchError(
            f"{sources[-1]}/{path} cannot be fetched: {failure}; is the publisher alive?"
        ) from failure

    async def _whole(self, url: str, timeout: aiohttp.ClientTimeout) -> bytes:
        body = bytearray()
        async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                raise SourceError(f"{url}: HTTP {response.status}")
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_MANIFEST_BYTES:
                    raise SourceError(f"{url} sends more than {MAX_MANIFEST_BYTES} bytes")
                await self._receiving.arrived(len(part))
        return bytes(body)

    def _gate_of(self, source: str, origin: str) -> AbstractAsyncContextManager[object]:
        return self._gate if source == origin else nullcontext()

    def _learn(self, path: str, raw: bytes, manifest: Manifest, origin: str) -> None:
        self._manifests[path] = _Known(
            raw, origin, manifest.origins, manifest.chunks, manifest.expires_s
        )
        self._manifests.move_to_end(path)
        for ref in manifest.chunks:
            self._origins[ref.id] = _Where(ref, _origin_of(ref, manifest.origins, origin), path)
        if len(self._manifests) > KNOWN_VERSIONS:
            self._manifests.popitem(last=False)
            self._origins = {
                ref.id: _Where(ref, _origin_of(ref, known.origins, known.origin), at)
                for at, known in self._manifests.items()
                for ref in known.chunks
            }
        learned, self._learned = self._learned, asyncio.Event()
        learned.set()

    async def _learns(self, what: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(KNOWN_WITHIN_S):
                while not what():
                    await self._learned.wait()
        except TimeoutError:
            return


def _origin_of(ref: ChunkRef, origins: tuple[str, ...], otherwise: str) -> str:
    """Where a chunk was published: several ranks of a trainer may serve a part each."""
    return otherwise if ref.origin is None else origins[ref.origin]

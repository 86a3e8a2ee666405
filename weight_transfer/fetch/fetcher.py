"""Chunk fetcher of a node: fetches each object once, for its own replicas and for its neighbours.

    origin ══slow link══► relay of the chunk ──► its neighbours

Which member relays an object follows from the names alone (`download.order`). A member asks the
members before it in that order, and the origin when there are none or none of them answers: so each
object crosses the slow link once, and the rest of an object that a dead relay began crosses it
through the next one.

`fetch_version` fetches a version: manifest, signature, then every missing chunk, verified.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from weight_transfer import (
    ChunkRef,
    ChunkStore,
    Manifest,
    ManifestError,
    ManifestExpired,
    VerifyKey,
    WeightError,
)
from weight_transfer.errors import FetchError, TransferError
from weight_transfer.fetch.download import (
    ATTEMPT_FAILURES,
    ATTEMPTS_PER_SOURCE,
    RETRY_PAUSE_S,
    SILENCE_TIMEOUT_S,
    Download,
    PeerScores,
    Route,
    Session,
    whole_reply,
)
from weight_transfer.fetch.limits import DownloadLimits
from weight_transfer.fetch.nccl import FixedGroup
from weight_transfer.format.manifest import MAX_MANIFEST_BYTES

# Chunks over the slow link at once. A download that waits for a neighbour does not count, or two
# nodes could wait for each other for ever.
PARALLEL_CHUNKS = 4
# Versions whose chunks a neighbour may still ask for before they are here.
KNOWN_VERSIONS = 32
# Followed jobs, as many as a scheduler accepts.
MOST_JOBS = 256
MOST_KNOWN_BYTES = 64 << 20
# Time that an early request of a neighbour waits for a manifest that names its object.
KNOWN_WITHIN_S = 2.0
_MANIFEST = re.compile(r"manifests/([0-9]{1,18})(\.base)?")
_log = logging.getLogger(__name__)
CHUNKS_AT_ONCE = 16
# Larger chunks are received alone, so that what came of one is not lost with its connection.
SMALL_BYTES = 64 << 10
LEAST_TOGETHER, MOST_TOGETHER = 2, 256
encode_names = msgspec.json.Encoder().encode


def ignore_reject(_: str) -> None:
    """Ignore the name of a chunk that arrived corrupt."""


@dataclass(frozen=True, slots=True)
class _Known:
    raw: bytearray
    origin: str
    origins: tuple[str, ...]
    refs: dict[str, ChunkRef]
    expires_s: float

    @classmethod
    def of(cls, raw: bytearray, manifest: Manifest, origin: str) -> Self:
        refs = {ref.id: ref for ref in manifest.chunks}
        return cls(raw, origin, manifest.origins, refs, manifest.expires_s)

    def origin_of(self, ref: ChunkRef) -> str:
        """Return the address that serves a chunk: each rank of a trainer may serve a part."""
        return self.origin if ref.origin is None else self.origins[ref.origin]


def path_of(version: int, *, base: bool = False) -> str:
    """Return the path of a version's manifest (of its base, or of its delta) below a server's
    address."""
    return f"manifests/{version}{'.base' if base else ''}"


class ChunkFetcher:
    """Fetcher of one node: it brings manifests and chunks into the store, each once at a time.

    `me`: this node's address among `members`, the relays of the cluster; empty for a node that
    relays nothing.
    """

    def __init__(
        self,
        session: Session,
        receiving: DownloadLimits,
        me: str = "",
        members: Iterable[str] = (),
    ) -> None:
        self._session = session
        self._receiving = receiving
        self._me = me
        self._members = frozenset(members)
        self._scores = PeerScores()
        self._gate = asyncio.Semaphore(PARALLEL_CHUNKS)
        self._bringing = asyncio.Lock()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._downloads: dict[str, Download] = {}
        self._kept: Counter[tuple[str, str]] = Counter()
        # (origin, key) by job. The job that was announced last is the last.
        self._following: OrderedDict[str, tuple[str, VerifyKey | None]] = OrderedDict()
        # By job and path: versions of two jobs have the same paths.
        self._manifests: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._learned = asyncio.Event()
        self.group: FixedGroup | None = None
        """Group of GPUs that pass chunks to each other over NCCL; None where all goes over HTTP."""

    @property
    def receiving(self) -> DownloadLimits:
        """Store, limits and counters of this node's downloads."""
        return self._receiving

    def enrol(self, members: Iterable[str]) -> None:
        """Replace the addresses of the cluster's relays, of which this node may be one."""
        self._members = frozenset(members)

    def route(self, name: str, origin: str) -> Route:
        """Return the addresses to ask for an object, in order; the origin is the last."""
        return Route.of(name, self._me, self._members, origin)

    def download(self, name: str) -> Download | None:
        """Return the running download of a chunk, None if there is none."""
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
        """Fetch and verify a version's manifest; return it and the bytes received for it.

        The bytes are 0 for a manifest that this node has already. Raises FetchError, and
        WeightError for a wrong manifest.
        """
        path = path_of(version, base=base)
        route = self.route(f"{job}/{path}", origin)
        wanted = _Wanted(job, version, base, verify_key)
        async with self._locks.setdefault(f"{job}/{path}", asyncio.Lock()):
            known = self._fresh(job, path)
            if known and known.origin == origin:
                read = partial(wanted.read, known.raw, relayed=False)
                return await self._receiving.read(read), 0
            raw, manifest = await self._object(path, [*route.before, origin], wanted)
            learned = await self._receiving.read(partial(_Known.of, raw, manifest, origin))
            self._learn((job, path), learned)
        return manifest, len(raw)

    @contextlib.contextmanager
    def keeping(self, job: str, version: int, *, base: bool = False) -> Iterator[None]:
        """Keep a version's manifest in memory within the block, however many others are learned."""
        key = job, path_of(version, base=base)
        self._kept[key] += 1
        try:
            yield
        finally:
            self._kept[key] -= 1
            if not self._kept[key]:
                del self._kept[key]
            self._forget()

    def _fresh(self, job: str, path: str) -> _Known | None:
        # An expired manifest may have been signed anew.
        known = self._manifests.get((job, path))
        return known if known and time.time() < known.expires_s else None

    def _where(self, name: str) -> tuple[ChunkRef, str, str, str] | None:
        """Return (chunk, its origin, path, job) by the newest known manifest that names it, else
        None."""
        for (job, path), known in reversed(self._manifests.items()):
            if ref := known.refs.get(name):
                return ref, known.origin_of(ref), path, job
        return None

    async def obtain(self, ref: ChunkRef, on_reject: Callable[[str], None] = ignore_reject) -> int:
        """Bring a chunk of a known manifest into the store; return the bytes received for it.

        Callers for the same chunk share one download, and its FetchError; the bytes are 0 for all
        but the first caller. A manifest is certain to be known only within `keeping`.
        """
        task = self._tasks.get(ref.id)
        mine = task is None
        if task is None:
            where = self._where(ref.id)
            if where is None:
                raise FetchError(f"chunk {ref.id} is of no manifest that is known here; ask again")
            task = asyncio.create_task(self._fetch(*where, on_reject))
            self._tasks[ref.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(ref.id, None))
        # A waiter that is cancelled must not cancel the download of the others.
        received: int = await asyncio.shield(task)
        return received if mine else 0

    async def bring_small(
        self, missing: dict[str, ChunkRef], on_reject: Callable[[str], None] = ignore_reject
    ) -> int:
        """Bring small chunks of known manifests into the store, many with one request, and take
        them out of `missing`; return the bytes received.

        A request for each of an adapter's hundreds costs more than its bytes. What does not come
        stays in `missing`, to be asked for alone; what came corrupt is told to `on_reject`. A
        cluster's relays share their chunks one by one.
        """
        if self._me or self._members:
            return 0
        by_origin: dict[str, list[ChunkRef]] = {}
        for ref in missing.values():
            where = self._where(ref.id)
            if where and ref.encoded_bytes <= SMALL_BYTES:
                by_origin.setdefault(where[1], []).append(ref)
        received = 0
        for origin, refs in by_origin.items():
            for at in range(0, len(refs), MOST_TOGETHER):
                some = refs[at : at + MOST_TOGETHER]
                size, sound = await self._together(origin, some, on_reject)
                received += size
                for name in sound:
                    del missing[name]
        return received

    async def _together(
        self, origin: str, refs: Sequence[ChunkRef], on_reject: Callable[[str], None]
    ) -> tuple[int, Collection[str]]:
        """Ask for these chunks with one request; return the bytes received, and which chunks are
        stored by it.
        """
        receiving, store = self._receiving, self._receiving.store
        timeout = aiohttp.ClientTimeout(None, sock_connect=3.0, sock_read=SILENCE_TIMEOUT_S)
        # Another replica of this node may be at the same version.
        async with self._bringing, self._gate:
            refs = [ref for ref in refs if not store.has(ref.id) and ref.id not in self._tasks]
            if len(refs) < LEAST_TOGETHER:
                return 0, ()
            names = encode_names([ref.id for ref in refs])
            size = sum(ref.encoded_bytes for ref in refs)
            try:
                body = await whole_reply(
                    self._session, f"{origin}/chunks", timeout, size, receiving.arrived, names
                )
            except ATTEMPT_FAILURES:
                return 0, ()
            receiving.traffic.fetched(len(body), from_publisher=True)
            try:
                sound = await receiving.work(partial(_kept, store, refs, body))
            except OSError:
                # The disk is full, for example: whoever asks for one alone says so.
                return len(body), ()
        for ref in refs:
            if ref.id not in sound:
                receiving.traffic.rejected_chunks += 1
                on_reject(ref.id)
        return len(body), sound

    def follow(self, job: str, origin: str, verify_key: VerifyKey | None) -> None:
        """Set the origin and key with which this node fetches a job's versions when neighbours
        ask."""
        self._following[job] = origin, verify_key
        self._following.move_to_end(job)
        if len(self._following) > MOST_JOBS:
            self._following.popitem(last=False)

    async def known(self, name: str, path: str = "", job: str = "") -> ChunkRef | None:
        """Return the manifest's entry for a chunk, None if no known manifest names it.

        It waits up to KNOWN_WITHIN_S for such a manifest, or fetches the manifest at `path` of a
        followed job.
        """
        if self._where(name) is None and path:
            await self.known_manifest(path, job)
        else:
            await self._learns(lambda: self._where(name) is not None)
        where = self._where(name)
        return where[0] if where else None

    async def known_manifest(self, path: str, job: str = "") -> bytearray | None:
        """Return the bytes of the manifest at `path`, None if this node has none and gets none.

        It is fetched if its job is followed, else waited for up to KNOWN_WITHIN_S. job: "" means
        the job that was followed last, then any job.
        """
        named = _MANIFEST.fullmatch(path)
        of = job or next(reversed(self._following), "")
        followed = self._following.get(of)
        if followed and named and self._fresh(of, path) is None:
            origin, key = followed
            with contextlib.suppress(WeightError):
                await self.manifest(of, int(named[1]), origin, key, base=bool(named[2]))
        else:
            await self._learns(lambda: self._named(path, job) is not None)
        known = self._named(path, job)
        return None if known is None else known.raw

    def versions(self) -> dict[str, tuple[int, int]]:
        """Return (number of known versions, newest version or 0) of each followed job."""
        numbers: dict[str, set[int]] = {job: set() for job in self._following}
        for job, path in self._manifests:
            if job in numbers and (named := _MANIFEST.fullmatch(path)):
                numbers[job].add(int(named[1]))
        return {job: (len(each), max(each, default=0)) for job, each in numbers.items()}

    def _named(self, path: str, job: str) -> _Known | None:
        """Return the known manifest of a job at that path; without a job the newest one.

        Else None.
        """
        known = reversed(self._manifests.items())
        return next((k for (whose, its), k in known if its == path and job in ("", whose)), None)

    async def close(self) -> None:
        """Cancel all downloads and leave the GPU group; received parts stay on disk."""
        if self.group is not None:
            self.group.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(
        self, ref: ChunkRef, origin: str, path: str, job: str, on_reject: Callable[[str], None]
    ) -> int:
        download = Download(ref, self._receiving, self._scores, on_reject, path, job)
        self._downloads[ref.id] = download
        try:
            route = self.route(ref.id, origin)
            await download.run(self._session, route, lambda s: self._gate_of(s, origin))
        except TransferError:
            raise
        except Exception as error:
            raise _unexpected(f"chunk {ref.id}", error) from error
        finally:
            del self._downloads[ref.id]
        return download.received

    async def _object(
        self, path: str, sources: list[str], wanted: "_Wanted"
    ) -> tuple[bytearray, Manifest]:
        """Fetch a manifest from the first source that has the wanted one.

        Return its bytes and itself. Raises FetchError when no source gives it, or the WeightError
        of the origin's reply.
        """
        failure: Exception | None = None
        timeout = aiohttp.ClientTimeout(None, sock_connect=3.0, sock_read=SILENCE_TIMEOUT_S)
        for attempt in range(ATTEMPTS_PER_SOURCE):
            for source in self._scores.ordered(sources, time.monotonic()):
                try:
                    query = f"?job={quote(wanted.job, safe='')}"
                    url, arrived = f"{source}/{path}{query}", self._receiving.arrived
                    raw = await whole_reply(
                        self._session, url, timeout, MAX_MANIFEST_BYTES, arrived
                    )
                    read = partial(wanted.read, raw, relayed=source != sources[-1])
                    return raw, await self._receiving.read(read)
                except _ForeignJobError as error:
                    if source == sources[-1]:
                        raise
                    # Another job's version of the same number is not damage.
                    failure = error
                    self._scores.failed(source, time.monotonic())
                except WeightError as error:
                    if source == sources[-1]:  # Nobody has another one than its publisher.
                        raise
                    failure = error
                    self._scores.corrupt(source, time.monotonic())
                except ATTEMPT_FAILURES as error:
                    failure = error
                    self._scores.failed(source, time.monotonic())
                except Exception as error:
                    raise _unexpected(f"{source}/{path}", error) from error
            await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
        raise FetchError(
            f"{sources[-1]}/{path} cannot be fetched: {failure}; is the publisher alive?"
        ) from failure

    def _gate_of(self, source: str, origin: str) -> AbstractAsyncContextManager[object]:
        return self._gate if source == origin else nullcontext()

    def _learn(self, key: tuple[str, str], known: _Known) -> None:
        self._manifests[key] = known
        self._manifests.move_to_end(key)
        self._forget()
        learned, self._learned = self._learned, asyncio.Event()
        learned.set()

    def _forget(self) -> None:
        """Forget the oldest manifests beyond the limits, except the newest and those that are
        kept."""
        size = sum(len(known.raw) for known in self._manifests.values())
        for key in list(self._manifests)[:-1]:
            if len(self._manifests) <= KNOWN_VERSIONS and size <= MOST_KNOWN_BYTES:
                return
            if key not in self._kept:
                known = self._manifests.pop(key)
                size -= len(known.raw)
                while known.refs:  # All at once would hold the interpreter's lock.
                    known.refs.popitem()

    async def _learns(self, what: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(KNOWN_WITHIN_S):
                while not what():
                    await self._learned.wait()
        except TimeoutError:
            return


class _ForeignJobError(FetchError):
    """Error for a received manifest of another job's version."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Job, version and key of a requested manifest, which a received one is checked against."""

    job: str
    version: int
    base: bool
    verify_key: VerifyKey | None

    def read(self, raw: bytearray, *, relayed: bool) -> Manifest:
        """Return the manifest in received bytes. Raises WeightError if it is not the requested one.

        relayed: True if a neighbour sent it, whose copy may have expired.
        """
        manifest = Manifest.from_bytes(raw, self.verify_key)
        if manifest.job != self.job:
            raise _ForeignJobError(
                f"asked for version {self.version} of {self.job}, was given one of {manifest.job}"
            )
        if manifest.version != self.version:
            raise FetchError(
                f"asked for version {self.version} of {self.job}, was given {manifest.version}"
            )
        if manifest.is_base is not self.base:
            raise ManifestError(f"version {self.version} came as a base, or instead of one")
        if relayed and time.time() >= manifest.expires_s:
            raise ManifestExpired(f"a neighbour's copy of version {self.version} expired")
        return manifest


def _unexpected(what: str, error: Exception) -> FetchError:
    _log.warning("%s: %s", what, error, exc_info=error)
    return FetchError(f"{what}: {type(error).__name__}: {error!s:.200}; it is asked for again")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Fetched version: its manifest, the manifest's file, and the bytes received over the link."""

    manifest: Manifest
    manifest_path: Path
    wire_bytes: int


async def fetch_version(
    fetcher: ChunkFetcher,
    url: str,
    job: str,
    version: int,
    verify_key: VerifyKey | None,
    on_reject: Callable[[str], None],
    hold: set[str],
    *,
    base: bool = False,
    on_the_way: bool = False,
) -> Fetched:
    """Fetch a version's manifest and all its missing chunks into the store.

    Return what was fetched. hold: set to which the names of all files that the version needs are
    added, so that they are kept. on_reject: called with the name of each chunk whose bytes did not
    match it; the chunk is fetched again. base: fetch the version as a whole instead of its delta.
    on_the_way: the version only leads to another one, so it may have expired. Raises FetchError
    after a bounded number of attempts, WeightError for a wrong manifest, StorageError when the disk
    refuses.
    """
    with fetcher.keeping(job, version, base=base):
        manifest, size = await fetcher.manifest(job, version, url, verify_key, base=base)
        if not on_the_way and time.time() >= manifest.expires_s:
            raise ManifestExpired(
                f"version {version} of {job} expired; publish a newer one, or check this clock"
            )
        hold.update(ref.id for ref in manifest.chunks)
        store = fetcher.receiving.store
        hold.update((store.manifest_path(version, base=base).name, store.apart_path(manifest).name))
        received = await _chunks(fetcher, manifest, on_reject)
    path = await fetcher.receiving.work(partial(store.put_manifest, manifest, jobs=True))
    return Fetched(manifest, path, size + received)


async def _chunks(
    fetcher: ChunkFetcher, manifest: Manifest, on_reject: Callable[[str], None]
) -> int:
    """Bring all chunks of a kept manifest into the store; return the bytes received for them."""
    receiving = fetcher.receiving
    await receiving.work(partial(receiving.cache.make_room, manifest))
    size = 0
    if fetcher.group is not None:
        # A member that has all chunks takes part too: the broadcasts need all members.
        shared = partial(fetcher.obtain, on_reject=on_reject)
        size = await fetcher.group.bring(manifest, receiving, shared, on_reject)
    missing = await receiving.work(partial(_missing, receiving.store, manifest, on_reject))
    size += await fetcher.bring_small(missing, on_reject)
    return size + await _obtained(fetcher, missing.values(), on_reject)


async def _obtained(
    fetcher: ChunkFetcher, refs: Iterable[ChunkRef], on_reject: Callable[[str], None]
) -> int:
    """Bring chunks into the store, CHUNKS_AT_ONCE at a time; return the bytes received for them.

    One task for each chunk could be a quarter of a million, which the garbage collector scans at
    once.
    """
    # Neighbours' requests are outside of this limit: this node may be waiting for a neighbour.
    pending = iter(refs)

    async def some() -> int:
        size = 0
        for ref in pending:
            size += await fetcher.obtain(ref, on_reject)
        return size

    tasks = [asyncio.create_task(some()) for _ in range(CHUNKS_AT_ONCE)]
    try:
        return sum(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # Of a version that lacks a chunk the others need not come now.
            task.cancel()


def _kept(store: ChunkStore, refs: Iterable[ChunkRef], body: bytearray) -> set[str]:
    """Store the chunks that follow each other in a reply; return the names of the sound ones."""
    at, kept = 0, set[str]()
    for ref in refs:
        if store.keep(ref.id, bytes(body[at : at + ref.encoded_bytes])):
            kept.add(ref.id)
        at += ref.encoded_bytes
    return kept


def _missing(
    store: ChunkStore, manifest: Manifest, on_reject: Callable[[str], None]
) -> dict[str, ChunkRef]:
    """Return the chunks of a manifest that are not stored, by name.

    Damaged ones are deleted, reported to `on_reject`, and count as missing.
    """
    missing = {}
    for ref in manifest.chunks:
        if store.mend(ref.id):
            on_reject(ref.id)
        if not store.has(ref.id):
            missing[ref.id] = ref
    return missing

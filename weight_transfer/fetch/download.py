"""Download of one chunk into the store: from which peer, resumed where the last one stopped.

`order` is rendezvous hashing: which member of a cluster takes which object over the slow link.
Every member computes the same order from the names alone. Without one of them the order of the
others stays: objects that a dead member had not finished fall to the next one, and nothing else
moves.

`Route` lists the peers that a node asks for an object, and which objects it may ask of each:

    before   members before this one in the object's order: they fetch it when asked
    holders  the next after it: they give what they have, or what comes to them from the origin
    origin   last

A member that was away asks the holders, so that objects which crossed the slow link meanwhile do
not cross it again. A member that takes an object from a holder gives nothing of it to others, so no
circle can form.

`PeerScores` ranks peers by failures, corrupt chunks and throughput: bad ones are asked later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Protocol
from urllib.parse import quote

import aiohttp
import blake3

from weight_transfer import ChunkRef
from weight_transfer.errors import FetchError
from weight_transfer.fetch.limits import DownloadLimits

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
CORRUPT_PAUSE_S = 300.0
# A neighbour with a smaller share of the origin's rate is given up for the origin.
SLOW_SHARE = 0.1
# Smaller replies give no rate: buffers on the way take them at once.
LEAST_SAMPLE_BYTES = 1 << 18
_MOST_SAMPLES = 16
_MOST_SOURCES = 4_096
# Members that took over while this one was away are next in the order.
MOST_HOLDERS = 2
BLOCK_BYTES = 1 << 18
ATTEMPTS_PER_SOURCE = 4
RETRY_PAUSE_S = 0.1
SILENCE_TIMEOUT_S = 10.0
# A relay whose own source went silent needs longer than SILENCE_TIMEOUT_S to ask another.
RELAY_SILENCE_TIMEOUT_S = 15.0
# Seconds of sending after which a source is judged by its rate.
PATIENCE_S = 2.0
# Most replies "in line" of a relay for one chunk; it sends one each IN_LINE_S (`serve`).
MOST_TURNS_IN_LINE = 300
# Header of a request for a chunk that is held already, or comes from the origin; the holder must
# not fetch it for this request.
HELD = "Rose-Held"
ASK_ANOTHER = 409
# Headers: path of a manifest that names the chunk, and the job of that manifest.
MANIFEST, JOB = "Rose-Manifest", "Rose-Job"
_CALL = aiohttp.ClientTimeout(total=5.0)


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    until_s: float = 0.0
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))


class PeerScores:
    """Scores of all sources of one node's downloads: failures, pauses and rates.

    The clock is handed in.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def ordered(self, sources: Sequence[str], now_s: float) -> list[str]:
        """Return the sources with those that are paused now moved to the end, shortest pause
        first."""
        until = {source: self._of(source).until_s for source in sources}
        good = [source for source in sources if until[source] <= now_s]
        return good + sorted((s for s in sources if until[s] > now_s), key=lambda s: until[s])

    def served(self, source: str, size: int, seconds: float, now_s: float) -> None:
        """Record that a source has sent `size` bytes in `seconds` until now, and clear its
        failures."""
        record = self._of(source)
        record.strikes = 0
        if size >= LEAST_SAMPLE_BYTES:
            record.samples.append((now_s, size / max(seconds, 1e-6)))

    def failed(self, source: str, now_s: float) -> None:
        """Record that a source refused, went silent or broke off.

        Its pause doubles with each failure.
        """
        record = self._of(source)
        record.until_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**record.strikes)
        record.strikes += 1

    def corrupt(self, source: str, now_s: float) -> None:
        """Record that a source sent wrong bytes; it is paused for CORRUPT_PAUSE_S."""
        record = self._of(source)
        record.until_s = now_s + CORRUPT_PAUSE_S
        record.strikes += 1

    def dawdles(self, source: str, rate: float, origin: str, since_s: float) -> bool:
        """Return True if a source's `rate` is below SLOW_SHARE of the origin's slowest since
        `since_s`.

        False for the origin itself, and if the origin sent nothing meanwhile. Earlier samples do
        not count, because a chunk's share of the slow link depends on how many share it. A
        neighbour's speed does not count either: it may have had the chunk that this source waits
        for.
        """
        meanwhile = [rate for at_s, rate in self._of(origin).samples if at_s > since_s]
        return source != origin and bool(meanwhile) and rate < SLOW_SHARE * min(meanwhile)

    def _of(self, source: str) -> _Record:
        if source not in self._records and len(self._records) >= _MOST_SOURCES:
            del self._records[next(iter(self._records))]
        return self._records.setdefault(source, _Record())


def order(members: Iterable[str], name: str) -> list[str]:
    """Return the members in their order of responsibility for the object `name`, each once.

    The order is rendezvous hashing, and the same on all members.
    """
    return sorted(set(members), key=lambda member: _weight(member, name), reverse=True)


def _weight(member: str, name: str) -> bytes:
    digest: bytes = blake3.blake3(f"{member}\0{name}".encode()).digest()
    return digest


@dataclass(frozen=True, slots=True)
class Route:
    """Addresses to ask for an object: members before this one, members after it, and the origin."""

    before: tuple[str, ...]
    holders: tuple[str, ...]
    origin: str

    @property
    def sources(self) -> tuple[str, ...]:
        """All addresses of the route, in the order in which they are asked."""
        return (*self.before, *self.holders, self.origin)

    @classmethod
    def of(cls, name: str, me: str, members: Iterable[str], origin: str) -> Route:
        """Return the route of an object for the node `me`, which is empty for a node that relays
        nothing."""
        if not me:
            return cls(tuple(order(members, name)), (), origin)
        everyone = order({*members, me}, name)
        at = everyone.index(me)
        after = everyone[at + 1 : at + 1 + MOST_HOLDERS]
        return cls(tuple(everyone[:at]), tuple(after), origin)


GateOf = Callable[[str], AbstractAsyncContextManager[object]]


class SourceError(Exception):
    """Error for a source that does not serve a chunk now; the next source is asked."""


# Failures of one source, after which the next one is asked. ValueError: an address that aiohttp,
# idna or the resolver cannot read, or a reply that is not HTTP.
ATTEMPT_FAILURES = (SourceError, aiohttp.ClientError, OSError, ValueError)


class NotHeldError(Exception):
    """Signal that a source does not hold a chunk.

    The next is asked, and the source's score stays.
    """


def refusal(url: str, status: int) -> str:
    """Return the error text for an HTTP reply of this status, with a hint for 401."""
    hint = "; is its origin in `transport.origins`, and the token right?" if status == 401 else ""
    return f"{url}: HTTP {status}{hint}"


class ReplyBody(Protocol):
    """Body of a reply, as aiohttp has it."""

    def iter_any(self) -> AsyncIterator[bytes]: ...


class Reply(Protocol):
    """Reply of a source of weights, as aiohttp has it."""

    @property
    def status(self) -> int: ...

    @property
    def content(self) -> ReplyBody: ...


class Session(Protocol):
    """Session that asks sources of weights: of aiohttp, or one that reads buckets too."""

    def request(
        self,
        method: str,
        url: str,
        *,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        allow_redirects: bool = True,
    ) -> AbstractAsyncContextManager[Reply]:
        """Return the context of a request, with its reply."""


async def whole_reply(
    session: Session,
    url: str,
    timeout: aiohttp.ClientTimeout,
    most: int,
    arrived: Callable[[int], Awaitable[None]] | None = None,
    asked: bytes | None = None,
) -> bytearray:
    """Return the body of a GET reply of at most `most` bytes, of a POST reply with a body `asked`.

    `arrived` is awaited with the size of each part. Raises SourceError for a longer body or a
    status other than 200. The bytes are not copied: copying would hold the interpreter's lock.
    """
    body = bytearray()
    method = "GET" if asked is None else "POST"
    async with session.request(
        method, url, data=asked, timeout=timeout, allow_redirects=False
    ) as response:
        if response.status != 200:
            raise SourceError(refusal(url, response.status))
        async for part in response.content.iter_any():
            body += part
            if len(body) > most:
                raise SourceError(f"{url} sends more than {most} bytes")
            if arrived is not None:
                await arrived(len(part))
    return body


class Download:
    """Download of one chunk into the store, from several sources in turn.

    `here`: bytes in the part file, which others may read before the chunk is whole. `restarts`: how
    often it began anew because received bytes were wrong; what was read before does not count then.
    `received`: all bytes that came over a link.
    """

    def __init__(
        self,
        ref: ChunkRef,
        receiving: DownloadLimits,
        scores: PeerScores,
        on_reject: Callable[[str], None],
        manifest: str,
        job: str,
    ) -> None:
        """Prepare a download of the chunk that `ref` describes.

        `manifest`, `job`: path of a manifest that names the chunk and the job of it, for relays
        that do not know the chunk yet. `on_reject`: called with the chunk's name when its bytes
        arrive corrupt.
        """
        self.ref = ref
        self._named_by = {MANIFEST: manifest, JOB: quote(job, safe="")}
        self.here = 0
        self.restarts = 0
        self.received = 0
        self.ended = False
        self.path = receiving.store.part_path(ref.id)
        self._receiving = receiving
        self._scores = scores
        self._on_reject = on_reject
        self._hash = blake3.blake3()
        # None until all bytes are there.
        self._sound: bool | None = None
        self._file: BinaryIO | None = None
        self._moved = asyncio.Event()
        self._source = ""
        self._route: Route | None = None

    @property
    def from_origin(self) -> bool:
        """True if the chunk comes from the origin, or waits for its turn on the slow link to it."""
        return self._route is not None and self._source == self._route.origin

    @property
    def from_holder(self) -> bool:
        """True if the chunk comes from a member after this one in the order, which may ask this
        node.

        Such a chunk is not passed on.
        """
        return self._route is not None and self._source in self._route.holders

    @property
    def moved(self) -> asyncio.Event:
        """Event that is set when `here` changes, the download restarts, or it ends.

        Each event is set once: read the property before looking at the state, then wait for it.
        """
        return self._moved

    def reader(self) -> int:
        """Return a new file descriptor of the part file, which the caller has to close.

        Call it only before the download has ended and when `here` is above 0.
        """
        assert self._file
        return os.dup(self._file.fileno())

    async def run(self, session: Session, route: Route, gate_of: GateOf) -> None:
        """Download the chunk into the store; return once it is there and verified, at once if it is
        there already.

        `gate_of(source)` is a context that is held while the source sends. Raises FetchError when
        no source gave it, StorageError when the disk refuses.
        """
        try:
            if not await self._receiving.work(self._open):
                await self._bring(session, route, gate_of)
        finally:
            if self._file:
                self._file.close()
            self.ended = True
            self._notify()

    async def _bring(self, session: Session, route: Route, gate_of: GateOf) -> None:
        failure: Exception | None = None
        for attempt in range(ATTEMPTS_PER_SOURCE):
            for source in self._scores.ordered(route.sources, time.monotonic()):
                alone = self.here == 0
                self._route = route
                # Set before the wait for the slow link: neighbours that ask need not wait, too.
                self._source = source if source == route.origin else ""
                try:
                    async with gate_of(source):
                        await self._pull(session, source, route)
                except NotHeldError as error:
                    failure = failure or error
                    continue
                except ATTEMPT_FAILURES as error:
                    self._scores.failed(source, time.monotonic())
                    failure = error
                    continue
                if self._sound is None:
                    await self._receiving.work(self._finish)
                if self._sound:
                    return
                self._receiving.traffic.rejected_chunks += 1
                self._on_reject(self.ref.id)
                if alone:  # Of several sources it is not known who lied.
                    self._scores.corrupt(source, time.monotonic())
                    await self._doubt(session, source)
                failure = SourceError("it arrived corrupt")
                await self._receiving.work(self._restart)
            await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
        self._receiving.traffic.failed_fetches += 1
        raise FetchError(
            f"chunk {self.ref.id} cannot be fetched: {failure or 'no source'}; is its source alive?"
        ) from failure

    async def _doubt(self, session: Session, source: str) -> None:
        """Ask a source to verify its own copy of the chunk; failures are ignored."""
        with contextlib.suppress(*ATTEMPT_FAILURES):
            url = f"{source}/chunks/{self.ref.id}/doubt"
            async with session.request("POST", url, timeout=_CALL, allow_redirects=False):
                pass

    async def _pull(self, session: Session, source: str, route: Route) -> None:
        if self.here == self.ref.encoded_bytes:
            return
        for _ in range(MOST_TURNS_IN_LINE):
            if await self._ask(session, source, route):
                return
        raise SourceError(f"{source} keeps chunk {self.ref.id} in line for too long")

    async def _ask(self, session: Session, source: str, route: Route) -> bool:
        """Receive the rest of the chunk from a source.

        Return False if it waits in line there (202).
        """
        headers = dict(self._named_by)
        if self.here:
            headers["Range"] = f"bytes={self.here}-"
        if source in route.holders:
            headers[HELD] = "1"
        silence_s = SILENCE_TIMEOUT_S if source == route.origin else RELAY_SILENCE_TIMEOUT_S
        timeout = aiohttp.ClientTimeout(None, sock_connect=3.0, sock_read=silence_s)
        url = f"{source}/chunks/{self.ref.id}"
        async with session.request(
            "GET", url, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status == 202:
                return False
            if response.status == ASK_ANOTHER:
                raise NotHeldError(f"{url} is not held there")
            if response.status == 200 and self.here:
                await self._receiving.work(self._restart)  # It does not know ranges.
            elif response.status not in (200, 206):
                raise SourceError(refusal(url, response.status))
            self._source = source
            await self._body(source, route.origin, response)
        if self.here != self.ref.encoded_bytes:
            raise SourceError(f"{url}: broke off after {self.here} bytes")
        return True

    async def _body(self, source: str, origin: str, response: Reply) -> None:
        # Measure from the first byte on: a relay's wait in line says nothing about its speed.
        asked_s, began_s, first = time.monotonic(), 0.0, self.here
        block = bytearray()
        try:
            async for part in response.content.iter_any():
                began_s = began_s or time.monotonic()
                block += part
                if self.here + len(block) > self.ref.encoded_bytes:
                    block.clear()
                    raise SourceError(f"{source} sends more than {self.ref.encoded_bytes} B")
                self._receiving.traffic.fetched(len(part), from_publisher=source == origin)
                # Unread bytes stay with the sender: TCP flow control applies the cap to it.
                await self._receiving.arrived(len(part))
                if len(block) >= BLOCK_BYTES:
                    await self._take(block)
                    self._judge(source, origin, self.here - first, began_s)
        finally:
            await self._take(block)  # A connection that broke: the next one goes on here.
        now_s = time.monotonic()
        self._scores.served(source, self.here - first, now_s - asked_s, now_s)

    def _judge(self, source: str, origin: str, size: int, began_s: float) -> None:
        """Raise SourceError if a neighbour has long sent at much less than the origin's rate."""
        seconds = time.monotonic() - began_s
        if seconds < PATIENCE_S or self._receiving.seconds_for(size) > 0.5 * seconds:
            return
        if self._scores.dawdles(source, size / seconds, origin, began_s):
            raise SourceError(f"{source} is slow: {size / seconds:.0f} B/s")

    async def _take(self, block: bytearray) -> None:
        if not block:
            return
        received = bytes(block)
        block.clear()
        await self._receiving.work(partial(self._write, received))
        self.received += len(received)
        self.here += len(received)
        self._notify()

    def _notify(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _open(self) -> bool:
        """Open the part file, and hash the bytes that an earlier download left in it; return True,
        and open nothing, if the store has the chunk.
        """
        if self._receiving.store.has(self.ref.id):
            return True
        self._file = self._receiving.store.open_part(self.ref.id)
        self._file.seek(0)
        while block := self._file.read(1 << 20):
            self._hash.update(block)
            self.here += len(block)
        if self.here > self.ref.encoded_bytes:
            self._restart()
        return False

    def _write(self, block: bytes) -> None:
        assert self._file
        self._file.write(block)
        self._file.flush()
        self._hash.update(block)
        # Adapters have hundreds of chunks of a few KB: each is proven in the same thread's turn.
        if self.here + len(block) == self.ref.encoded_bytes:
            self._finish()

    def _restart(self) -> None:
        assert self._file
        self._file.truncate(0)
        self._hash = blake3.blake3()
        self._sound = None
        self.here = 0
        self.restarts += 1

    def _finish(self) -> None:
        self._sound = self._hash.hexdigest() == self.ref.id
        if self._sound:
            assert self._file
            self._receiving.store.adopt(self.ref.id, self._file)

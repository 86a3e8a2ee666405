"""Limits and counts of a weight download, on a machine that also serves.

`Traffic` counts bytes and replies that a weight server sent, and bytes that its fetcher received.
`ChunkCache` bounds the disk: a chunk store with a cap. Chunks that no version needs now are
evicted, the oldest first. `TokenBucket` bounds the link: bytes a second on the average, with a
bounded burst. `DownloadLimits` has all limits of one node: link, disk and CPU.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from weight_transfer import ChunkStore, Manifest, StoredFile
from weight_transfer.errors import CacheFullError, StorageError

# A peer whose last request is at most this old counts as a reader.
READER_S = 60.0
MOST_PEERS = 4_096
BURST_S = 0.1
MIN_BURST_BYTES = 64 << 10


class ChunkSource(StrEnum):
    """Kind of server that chunks are fetched from."""

    PUBLISHER = "publisher"
    NEIGHBOUR = "neighbour"


class Asked(StrEnum):
    """Kind of object that a reader requests from a weight server."""

    CHUNK = "chunk"
    MANIFEST = "manifest"


class ReplyKind(StrEnum):
    """Kind of reply of a weight server, for counting."""

    SENT = "sent"
    IN_LINE = "in_line"
    ELSEWHERE = "elsewhere"
    MISSING = "missing"
    REFUSED = "refused"
    FAILED = "failed"


_ANSWERS = {
    202: ReplyKind.IN_LINE,
    401: ReplyKind.REFUSED,
    403: ReplyKind.REFUSED,
    404: ReplyKind.MISSING,
    409: ReplyKind.ELSEWHERE,
}


def answer_of(status: int) -> ReplyKind:
    """Return the kind of reply that an HTTP status stands for."""
    return _ANSWERS.get(status) or (ReplyKind.SENT if status < 400 else ReplyKind.FAILED)


@dataclass(slots=True)
class Traffic:
    """Counters of one node's weight server and fetcher since its start.

    Bytes are encoded bytes of chunks. `rejected_chunks`: received chunks whose digest was wrong.
    `answers`: replies by requested object and kind.
    """

    clock_s: Callable[[], float] = time.monotonic
    served_bytes: int = 0
    fetched_bytes: Counter[ChunkSource] = field(default_factory=Counter)
    failed_fetches: int = 0
    rejected_chunks: int = 0
    answers: Counter[tuple[Asked, ReplyKind]] = field(default_factory=Counter)
    _peers: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def fetched(self, size: int, *, from_publisher: bool) -> None:
        """Count received bytes of a chunk, by the kind of server that sent them."""
        self.fetched_bytes[ChunkSource.PUBLISHER if from_publisher else ChunkSource.NEIGHBOUR] += (
            size
        )

    def answered(self, asked: Asked, status: int, peer: str) -> None:
        """Count a reply by object and HTTP status, and note the time of the peer's request."""
        self.answers[asked, answer_of(status)] += 1
        self._peers[peer] = self.clock_s()
        self._peers.move_to_end(peer)
        if len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)

    def readers(self) -> int:
        """Return the number of addresses that sent a request within READER_S."""
        oldest_s = self.clock_s() - READER_S
        while self._peers and next(iter(self._peers.values())) < oldest_s:
            self._peers.popitem(last=False)
        return len(self._peers)


def evictions(
    files: Collection[StoredFile], needed: Collection[str], room_bytes: int
) -> list[StoredFile]:
    """Return the files to delete, oldest first, so that the others take at most `room_bytes`.

    A `needed` file is never among them, even where that leaves too little room.
    """
    excess = sum(file.size for file in files) - room_bytes
    leaving: list[StoredFile] = []
    for file in sorted(files, key=lambda file: (file.written_ns, file.name)):
        if excess <= 0:
            break
        if file.name not in needed:
            leaving.append(file)
            excess -= file.size
    return leaving


class ChunkCache:
    """Chunk store with a cap of `cap_bytes` on its disk space, None for no cap.

    Usable in any thread.
    """

    def __init__(self, store: ChunkStore, cap_bytes: int | None) -> None:
        self.store = store
        self._cap_bytes = cap_bytes
        self._holds: dict[int, set[str]] = {}

    @contextmanager
    def hold(self) -> Iterator[set[str]]:
        """Yield an empty set.

        Files whose names are added to it are not evicted until the block ends.
        """
        names: set[str] = set()
        self._holds[id(names)] = names
        try:
            yield names
        finally:
            del self._holds[id(names)]
            while names:  # All at once would hold the interpreter's lock.
                names.pop()

    def make_room(self, manifest: Manifest) -> None:
        """Evict files of other versions so that all chunks of a manifest fit under the cap.

        Raises CacheFullError when they cannot fit.
        """
        if self._cap_bytes is None:
            return
        absent = {ref.id: ref.encoded_bytes for ref in manifest.chunks}
        missing = sum(size for name, size in absent.items() if not self.store.has(name))
        files = self.store.files()
        kept = absent, *tuple(self._holds.values())
        # Intersect with stored names: a union of all held names would keep the interpreter's lock.
        needed = {file.name for file in files if any(file.name in names for names in kept)}
        room = self._cap_bytes - missing - manifest.size
        leaving = evictions(files, needed, room)
        for file in leaving:
            self.store.discard(file)
        staying = sum(f.size for f in files) - sum(f.size for f in leaving)
        if staying > room:
            raise CacheFullError(
                f"version {manifest.version} needs {missing} bytes more than the cap of"
                f" {self._cap_bytes} leaves; raise `receiver.disk_bytes`"
            )


class TokenBucket:
    """Token bucket for bytes: it may go into debt, so that a piece above the burst passes too.

    The clock is handed in: seconds of one monotonic clock.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        if bytes_per_s <= 0 or burst_bytes <= 0:
            raise ValueError("bytes_per_s and burst_bytes must be positive")
        self._rate = bytes_per_s
        self._burst = burst_bytes
        self._level = burst_bytes
        self._at_s: float | None = None

    def take(self, size: int, now_s: float) -> float:
        """Take `size` bytes at `now_s`.

        Return the seconds to wait before taking more, 0 for none.
        """
        elapsed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._level = min(self._burst, self._level + elapsed_s * self._rate) - size
        self._at_s = now_s
        return max(0.0, -self._level / self._rate)


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Caps:
    """Caps of one node's downloads; None means no cap.

    `bytes_per_s`: average rate of the link. `disk_bytes`: size of the store. `threads`, `nice`:
    number and niceness of the threads that hash, check and write what arrives. Decoding is not
    capped here: the engine does it.
    """

    bytes_per_s: int | None = None
    disk_bytes: int | None = None
    threads: int = 2
    nice: int = 10


class DownloadLimits:
    """Store, caps, counters and threads of one node's downloads, shared by all of its replicas."""

    def __init__(self, store: ChunkStore, caps: Caps) -> None:
        self.store = store
        self.cache = ChunkCache(store, caps.disk_bytes)
        self.traffic = Traffic()
        self._bytes_per_s = caps.bytes_per_s
        self._bucket: TokenBucket | None = None
        if caps.bytes_per_s is not None:
            burst = max(MIN_BURST_BYTES, caps.bytes_per_s * BURST_S)
            self._bucket = TokenBucket(caps.bytes_per_s, burst)
        self._pool = ThreadPoolExecutor(
            caps.threads, thread_name_prefix="rose-receiver", initializer=_be_nice, initargs=(caps,)
        )
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="rose-manifests")

    def seconds_for(self, size: int) -> float:
        """Return the shortest time in seconds for `size` bytes under the link's cap, 0 without a
        cap."""
        return size / self._bytes_per_s if self._bytes_per_s else 0.0

    async def arrived(self, size: int) -> None:
        """Take `size` received bytes from the link's cap, and wait until more may be received."""
        if self._bucket is None:
            return
        wait_s = self._bucket.take(size, time.monotonic())
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def work(self, task: Callable[[], Result]) -> Result:
        """Run a task that needs CPU or the disk in a low-priority thread, and return its result.

        An OSError becomes StorageError.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, task)
        except OSError as error:
            raise StorageError(
                f"{error.filename or self.store.chunks_dir.parent}: {error.strerror or error};"
                " what came of the weights is kept, make room there"
            ) from error

    async def read(self, task: Callable[[], Result]) -> Result:
        """Run a task that decodes in Python in a thread of normal priority, and return its result.

        Such a task holds the interpreter's lock now and then: on a busy machine a low-priority
        thread would keep the lock while it waits for a core.
        """
        return await asyncio.get_running_loop().run_in_executor(self._reader, task)

    def close(self) -> None:
        """Shut the threads down once their tasks are done, without waiting."""
        self._pool.shutdown(wait=False)
        self._reader.shutdown(wait=False)


def _be_nice(caps: Caps) -> None:
    # On Linux niceness is each thread's own.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), caps.nice)

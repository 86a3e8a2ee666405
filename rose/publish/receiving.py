"""What fetching weights may cost the machine that also serves: link, disk and CPU."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from rose.errors import RoseError
from rose.publish.bucket import TokenBucket
from rose.publish.shelf import Shelf
from weight_transfer import ChunkStore

BURST_S = 0.1
MIN_BURST_BYTES = 64 << 10

Result = TypeVar("Result")


class StorageError(RoseError):
    """The disk refuses what arrives."""


@dataclass(frozen=True, slots=True)
class Caps:
    """None bounds nothing. `threads` and `nice`: who hashes, checks and writes what arrives.

    Decoding is done by the engine, under its own placement (a guest's is behind everybody else).
    """

    bytes_per_s: int | None = None
    disk_bytes: int | None = None
    threads: int = 2
    nice: int = 10


class Receiving:
    """One node's receiver: all its replicas together stay within `caps`."""

    def __init__(self, store: ChunkStore, caps: Caps) -> None:
        self.store = store
        self.shelf = Shelf(store, caps.disk_bytes)
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
        """How long the cap on the link makes so many bytes take."""
        return size / self._bytes_per_s if self._bytes_per_s else 0.0

    async def arrived(self, size: int) -> None:
        """So many bytes came; return when more may come."""
        if self._bucket is None:
            return
        wait_s = self._bucket.take(size, time.monotonic())
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def work(self, task: Callable[[], Result]) -> Result:
        """Run what costs CPU or waits for the disk in one of the receiver's own threads.

        Raises StorageError when the disk refuses.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, task)
        except OSError as error:
            raise StorageError(
                f"{error.filename or self.store.chunks_dir.parent}: {error.strerror or error};"
                " what came of the weights is kept, make room there"
            ) from error

    async def read(self, task: Callable[[], Result]) -> Result:
        """Run what decodes in Python, and so holds the interpreter's lock now and then.

        In a thread that is not nice: on a busy machine one that is would keep the lock from the
        guard for as long as it waits for a core.
        """
        return await asyncio.get_running_loop().run_in_executor(self._reader, task)

    def close(self) -> None:
        """Let the threads go once they are done."""
        self._pool.shutdown(wait=False)
        self._reader.shutdown(wait=False)


def _be_nice(caps: Caps) -> None:
    # On Linux niceness is each thread's own.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), caps.nice)

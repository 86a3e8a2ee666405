"""One chunk on its way into the store: from whoever has it, going on where the last one stopped."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import BinaryIO

import aiohttp
import blake3

from rose.errors import RoseError
from rose.publish.receiving import Receiving
from rose.publish.standing import Standing
from weight_transfer import ChunkRef

BLOCK_BYTES = 1 << 18
ATTEMPTS_PER_SOURCE = 4
RETRY_PAUSE_S = 0.1
SILENCE_TIMEOUT_S = 10.0
# A source is judged by its rate once it had that long.
PATIENCE_S = 2.0


GateOf = Callable[[str], AbstractAsyncContextManager[object]]


class FetchError(RoseError):
    """A version could not be fetched whole; what came stays and is not fetched again."""


class SourceError(Exception):
    """This source does not serve this chunk now."""


class Download:
    """A chunk that arrives. Others may read what is here already, before all of it is.

    `here`: bytes of the part file. `restarts`: how often it began anew, since what had come was
    wrong: nothing read before counts then. `received`: all bytes that came over a link.
    """

    def __init__(
        self,
        ref: ChunkRef,
        receiving: Receiving,
        standing: Standing,
        on_reject: Callable[[str], None],
    ) -> None:
        self.ref = ref
        self.here = 0
        self.restarts = 0
        self.received = 0
        self.ended = False
        self.path = receiving.store.part_path(ref.id)
        self._receiving = receiving
        self._standing = standing
        self._on_reject = on_reject
        self._hash = blake3.blake3()
        self._file: BinaryIO | None = None
        self._moved = asyncio.Event()

    @property
    def moved(self) -> asyncio.Event:
        """Set when there is more than now, or less, or an end. Take it before looking."""
        return self._moved

    def reader(self) -> int:
        """A descriptor of what is here, the caller's to close; good whatever becomes of the file.

        Only while it has not ended and something is here.
        """
        assert self._file
        return os.dup(self._file.fileno())

    async def run(
        self, session: aiohttp.ClientSession, sources: Sequence[str], gate_of: GateOf
    ) -> None:
        """Bring it into the store. `gate_of` a source is held while it sends.

        Raises FetchError when no source gave it.
        """
        try:
            await self._receiving.work(self._open)
            await self._bring(session, sources, gate_of)
        finally:
            if self._file:
                self._file.close()
            self.ended = True
            self._told()

    async def _bring(
        self, session: aiohttp.ClientSession, sources: Sequence[str], gate_of: GateOf
    ) -> None:
        failure: Exception | None = None
        for attempt in range(ATTEMPTS_PER_SOURCE):
            for source in self._standing.ordered(sources, time.monotonic()):
                alone = self.here == 0
                try:
                    async with gate_of(source):
                        await self._pull(session, source)
                except (SourceError, aiohttp.ClientError, TimeoutError) as error:
                    self._standing.failed(source, time.monotonic())
                    failure = error
                    continue
                if await self._receiving.work(self._finish):
                    return
                self._on_reject(self.ref.id)
                if alone:  # Of several sources it is not known who lied.
                    self._standing.corrupt(source, time.monotonic())
                failure = SourceError("it arrived corrupt")
                await self._receiving.work(self._restart)
            await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
        raise FetchError(
            f"chunk {self.ref.id} cannot be fetched: {failure or 'no source'}; is its source alive?"
        ) from failure

    async def _pull(self, session: aiohttp.ClientSession, source: str) -> None:
        if self.here == self.ref.encoded_bytes:
            return
        headers = {"Range": f"bytes={self.here}-"} if self.here else {}
        timeout = aiohttp.ClientTimeout(None, sock_connect=3.0, sock_read=SILENCE_TIMEOUT_S)
        url = f"{source}/chunks/{self.ref.id}"
        async with session.get(url, headers=headers, timeout=timeout) as response:
            if response.status == 200 and self.here:
                await self._receiving.work(self._restart)  # It does not know ranges.
            elif response.status not in (200, 206):
                raise SourceError(f"{url}: HTTP {response.status}")
            await self._body(source, response)
        if self.here != self.ref.encoded_bytes:
            raise SourceError(f"{url}: broke off after {self.here} bytes")

    async def _body(self, source: str, response: aiohttp.ClientResponse) -> None:
        began_s, first = time.monotonic(), self.here
        block = bytearray()
        try:
            async for part in response.content.iter_any():
                block += part
                if self.here + len(block) > self.ref.encoded_bytes:
                    block.clear()
                    raise SourceError(f"{response.url} sends more than {self.ref.encoded_bytes} B")
                # What is not read stays with the sender: TCP passes the cap on.
                await self._receiving.arrived(len(part))
                if len(block) >= BLOCK_BYTES:
                    await self._take(block)
                    self._judge(source, self.here - first, time.monotonic() - began_s)
        finally:
            await self._take(block)  # A connection that broke: the next one goes on here.
        self._standing.served(source, self.here - first, time.monotonic() - began_s)

    def _judge(self, source: str, size: int, seconds: float) -> None:
        capped = self._receiving.seconds_for(size) > 0.5 * seconds
        if seconds > PATIENCE_S and not capped and self._standing.dawdles(source, size / seconds):
            self._standing.served(source, size, seconds)
            raise SourceError(f"{source} is slow: {size / seconds:.0f} B/s")

    async def _take(self, block: bytearray) -> None:
        """Write what has come, and empty `block`."""
        if not block:
            return
        come = bytes(block)
        block.clear()
        await self._receiving.work(partial(self._write, come))
        self.received += len(come)
        self.here += len(come)
        self._told()

    def _told(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _open(self) -> None:
        """Go on with what an earlier try left, however that ended."""
        self._file = self.path.open("a+b")
        self._file.seek(0)
        while block := self._file.read(1 << 20):
            self._hash.update(block)
            self.here += len(block)
        if self.here > self.ref.encoded_bytes:
            self._restart()

    def _write(self, block: bytes) -> None:
        assert self._file
        self._file.write(block)
        self._file.flush()
        self._hash.update(block)

    def _restart(self) -> None:
        assert self._file
        self._file.truncate(0)
        self._hash = blake3.blake3()
        self.here = 0
        self.restarts += 1

    def _finish(self) -> bool:
        if self._hash.hexdigest() != self.ref.id:
            return False
        assert self._file
        self._receiving.store.adopt(self.ref.id, self._file)
        return True

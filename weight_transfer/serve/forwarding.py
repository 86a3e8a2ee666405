"""Forwarding of a chunk that is still arriving: a relay passes each part on as it comes.

The last bytes wait until the whole was proved, so that no neighbour ever ends up with a chunk that
this node would refuse. While the chunk waits for its turn on the slow link the caller hears 202.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from aiohttp import web

from weight_transfer import ChunkRef, ChunkStore
from weight_transfer.errors import TransferError
from weight_transfer.fetch.download import BLOCK_BYTES, HELD, JOB, MANIFEST, Download
from weight_transfer.fetch.fetcher import ChunkFetcher

HELD_BACK_BYTES = 1 << 16
# A caller whose chunk waits for its turn on the slow link hears so after that long.
IN_LINE_S = 2.0


class ChunkForwarder:
    """Chunks on their way into `store`, for callers of a server."""

    def __init__(
        self,
        store: ChunkStore,
        fetcher: ChunkFetcher,
        stored: Callable[[str], Awaitable[web.StreamResponse]],
    ) -> None:
        """stored: makes the answer that is a chunk's file."""
        self._store = store
        self._fetcher = fetcher
        self._stored = stored

    async def answer(self, request: web.Request, name: str) -> web.StreamResponse:
        """Return a reply that sends a chunk while it is being received."""
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

    async def _begun(self, ref: ChunkRef, wanted: "asyncio.Task[int]") -> Download | None:
        """A download with something to pass on, waited for shortly: the caller shall see life."""
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
        self, request: web.Request, download: Download, wanted: "asyncio.Task[int]"
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
        wanted: "asyncio.Task[int]",
        at: int,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Send a chunk from byte `at` on, as it comes; False when what was sent is not of it."""
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
    """Return N of `Range: bytes=N-`, the only supported form; 0 without a range."""
    try:
        asked = request.http_range
    except ValueError as error:
        raise web.HTTPRequestRangeNotSatisfiable(text="ask for bytes=N-") from error
    at = asked.start or 0
    if asked.stop is not None or not 0 <= at < size:
        raise web.HTTPRequestRangeNotSatisfiable(text=f"ask for bytes=N- of {size}")
    return at

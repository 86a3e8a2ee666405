"""One streamed turn as its reader sees it: an async iterator of chunks, then the whole turn."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from rose.client.errors import ClientClosed
from rose.client.turn import TokenChunk, Turn

# Chunks that wait for a slow reader; beyond that the gateway is not read from.
CHUNKS_AHEAD = 64
ChunkSink = Callable[[TokenChunk], Awaitable[None]]


class TurnStream:
    """`async with client.stream(…) as stream: async for chunk in stream: …`; then `stream.turn`.

    Leaving the block before the end cancels the turn, at the gateway and its replica too.
    """

    def __init__(self, run: Callable[[ChunkSink], Awaitable[Turn]]) -> None:
        self._run = run
        self._chunks: deque[TokenChunk] = deque()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._work: asyncio.Future[Turn] | None = None
        self._turn: Turn | None = None

    async def into(self, sink: ChunkSink) -> Turn:
        """The turn, with `sink` as its reader; what that raises ends it."""
        return await self._run(sink)

    @property
    def turn(self) -> Turn:
        """The whole turn. Raises ClientClosed before the last chunk was read."""
        if self._turn is None:
            raise ClientClosed("the turn is not whole: read the stream to its end first")
        return self._turn

    async def __aenter__(self) -> Self:
        self._work = asyncio.ensure_future(self._run(self._put))
        self._work.add_done_callback(lambda work: self._news.set())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        """The next chunk. Raises the turn's error after its last chunk."""
        if self._work is None:
            raise ClientClosed("use `async with client.stream(...) as stream` before reading it")
        while not self._chunks and not self._work.done():
            self._news.clear()
            await self._news.wait()
        if self._chunks:
            self._room.set()
            return self._chunks.popleft()
        self._turn = await self._work
        raise StopAsyncIteration

    async def _put(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._news.set()
        while len(self._chunks) > CHUNKS_AHEAD:
            self._room.clear()
            await self._room.wait()

"""Streamed turns, and the ledger of a client: its running turns and the counts of ended ones.

A `TurnStream` is an async iterator of chunks, and holds the whole turn afterwards.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from rose.client.errors import ClientClosed
from rose.client.types import ClientTurn, TokenChunk, Turn


@dataclass(frozen=True, slots=True)
class TurnProgress:
    """State of a running turn. `tokens`: received so far; 0 until the end unless streamed.

    `tries`: requests sent for the turn, the first one included. `gateway`: address tried last.
    """

    request_id: str
    session_id: str
    gateway: str
    tokens: int
    tries: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Running turns of a client, and counts of ended ones since the client was created.

    `tokens`: output tokens of the finished turns. `repeated_tries`: requests beyond each ended
    turn's first one.
    """

    running: tuple[TurnProgress, ...]
    finished: int
    failed: int
    cancelled: int
    repeated_tries: int
    tokens: int


@dataclass(slots=True, eq=False)
class RunningTurn:
    """Entry of one running turn in the client's ledger, updated by the turn's task."""

    ask: ClientTurn
    began_s: float
    task: "asyncio.Task[object] | None" = None
    gateway: str = ""
    tokens: int = 0
    tries: int = 0
    cancelled: bool = False

    def cancel(self) -> None:
        """Cancel the turn's task; its waiter gets TurnCancelled."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


@dataclass(slots=True)
class Ledger:
    """A client's running turns by request id, and counts of the ended ones."""

    running: dict[str, RunningTurn] = field(default_factory=dict)
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    repeated_tries: int = 0
    tokens: int = 0

    def close(self, row: RunningTurn, tokens: int | None) -> None:
        """Remove a turn that ended, and count it as finished, cancelled or failed.

        tokens: number of its output tokens; None if it was cancelled or failed.
        """
        self.running.pop(row.ask.request_id, None)
        self.repeated_tries += max(0, row.tries - 1)
        if tokens is not None:
            self.finished += 1
            self.tokens += tokens
        elif row.cancelled:
            self.cancelled += 1
        else:
            self.failed += 1

    def snapshot(self, now_s: float) -> Progress:
        rows = tuple(
            TurnProgress(
                row.ask.request_id,
                row.ask.session_id,
                row.gateway,
                row.tokens,
                row.tries,
                now_s - row.began_s,
            )
            for row in self.running.values()
        )
        return Progress(
            rows, self.finished, self.failed, self.cancelled, self.repeated_tries, self.tokens
        )


# Chunks kept for a slow reader; beyond that the gateway is not read from.
CHUNKS_AHEAD = 64
ChunkSink = Callable[[TokenChunk], Awaitable[None]]


class TurnStream:
    """One turn as a stream: async context manager and iterator of chunks, then `turn`.

    Entering sends the request. Leaving the block before the end cancels the turn, at the gateway
    and its replica too. A slow reader makes the gateway wait once CHUNKS_AHEAD chunks are unread.
    """

    def __init__(self, run: Callable[[ChunkSink], Awaitable[Turn]]) -> None:
        self._run = run
        self._chunks: deque[TokenChunk] = deque()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._work: asyncio.Future[Turn] | None = None
        self._turn: Turn | None = None

    async def into(self, sink: ChunkSink) -> Turn:
        """Send the request, await `sink` with each chunk, and return the whole turn.

        Use it instead of `async with`. An error of `sink` ends the turn and is raised.
        """
        return await self._run(sink)

    @property
    def turn(self) -> Turn:
        """The whole turn. Raises ClientClosed before the iteration has ended."""
        if self._turn is None:
            raise ClientClosed("the turn is not whole: read the stream to its end first")
        return self._turn

    async def __aenter__(self) -> Self:
        self._work = asyncio.ensure_future(self._run(self._put))
        self._work.add_done_callback(lambda work: self._news.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        """Return the next chunk; after the last one raise the turn's error or end the iteration."""
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

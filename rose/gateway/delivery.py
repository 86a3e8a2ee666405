"""Writing answers to connections: whole or as server-sent events, never faster than they are read.

A reader that is slow costs its connection's buffer and the turn's own tokens, nothing more: the
turn runs on, and the connection is closed when it takes nothing for `slow_reader_s`.
"""

import asyncio

from aiohttp import web

from rose.gateway.ask import Ask, Dialect
from rose.gateway.errors import TurnError
from rose.gateway.feed import TurnFeed
from rose.gateway.stats import GatewayStats

EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
# Bounds what one event holds, and so what a slow reader can make the gateway encode at once.
MAX_EVENT_TOKENS = 512
# With less than this unsent no connection is paused, so a write cannot wait and needs no clock.
UNWATCHED_BYTES = 16 << 10


class Delivery:
    """Writes to one connection."""

    def __init__(self, http: web.Request, slow_reader_s: float, stats: GatewayStats) -> None:
        self._http = http
        self._slow_reader_s = slow_reader_s
        self._stats = stats

    async def whole(self, body: bytes) -> web.Response:
        """Answer with a whole body."""
        response = web.Response(body=body, content_type="application/json")
        if len(body) > UNWATCHED_BYTES:
            try:
                async with self._patience():
                    await response.prepare(self._http)
                    await response.write_eof()
            except ConnectionError:
                # The reader is gone, or was too slow: nobody is left to tell.
                return response
        return response

    async def stream(self, dialect: Dialect, ask: Ask, feeds: list[TurnFeed]) -> web.StreamResponse:
        """Stream all turns to their ends. Raises a turn's TurnError before the first byte only."""
        seen = [min(ask.resume_from, len(feed.tokens)) for feed in feeds]
        await _any_news(feeds, seen)
        for feed in feeds:
            if feed.error is not None and not feed.tokens:
                raise feed.error
        response = web.StreamResponse(headers=EVENT_STREAM)
        try:
            await response.prepare(self._http)
            await self._write_all(response, dialect, ask, feeds)
        except ConnectionError:
            # The reader is gone, or was too slow: nobody is left to tell.
            return response
        return response

    async def _write_all(
        self, response: web.StreamResponse, dialect: Dialect, ask: Ask, feeds: list[TurnFeed]
    ) -> None:
        await self._write(response, ask.answer.begin(feeds))
        try:
            if len(feeds) == 1:
                await self._follow(response, ask, 0, feeds[0])
            else:
                async with asyncio.TaskGroup() as group:
                    for index, feed in enumerate(feeds):
                        group.create_task(self._follow(response, ask, index, feed))
            await self._write(response, ask.answer.close(feeds))
        except TurnError as error:
            await self._write(response, dialect.broken(error))
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            if not isinstance(first, TurnError):
                raise first from errors
            await self._write(response, dialect.broken(first))
        await response.write_eof()

    async def _follow(
        self, response: web.StreamResponse, ask: Ask, index: int, feed: TurnFeed
    ) -> None:
        start = ask.resume_from
        while True:
            await feed.beyond(start)
            end = min(len(feed.tokens), start + MAX_EVENT_TOKENS)
            last = feed.over and end >= len(feed.tokens)
            if feed.error is None or end > start:
                event = ask.answer.part(index, feed, min(start, end), end)
                if ask.event_ids:
                    event = b"id: %d\n" % end + event
                await self._write(response, event)
            start = end
            if last and len(feed.tokens) == end:
                if feed.error is not None:
                    raise feed.error
                return

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        transport = self._http.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the reader is gone")
        if not data:
            return
        if transport.get_write_buffer_size() + len(data) < UNWATCHED_BYTES:
            await response.write(data)
            return
        async with self._patience():
            await response.write(data)

    def _patience(self) -> "_Patience":
        return _Patience(self._http, self._slow_reader_s, self._stats)


class _Patience:
    """Closes the connection of a reader that takes nothing for too long."""

    def __init__(self, http: web.Request, limit_s: float, stats: GatewayStats) -> None:
        self._http = http
        self._timeout = asyncio.timeout(limit_s)
        self._stats = stats

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except TimeoutError as expired:
            self._stats.slow_readers += 1
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError("the reader took nothing for too long") from expired


async def _any_news(feeds: list[TurnFeed], seen: list[int]) -> None:
    """Return when any of the turns has something to write, or has failed."""
    if len(feeds) == 1:
        await feeds[0].beyond(seen[0])
        return
    waits = [
        asyncio.ensure_future(feed.beyond(start)) for feed, start in zip(feeds, seen, strict=True)
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()

"""Answers on their way to connections: whole, or as server-sent events."""

import asyncio

from aiohttp import web

from rose.gateway.ask import Ask, Dialect
from rose.gateway.errors import TurnError
from rose.gateway.event_writer import UNWATCHED_BYTES, EventWriter, Patience
from rose.gateway.feed import TurnFeed
from rose.gateway.follower import Follower, follow_all
from rose.gateway.stats import GatewayStats

EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


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
                async with Patience(self._http, self._slow_reader_s, self._stats):
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
        writer = EventWriter(self._http, response, self._slow_reader_s, self._stats)
        try:
            await writer.begin()
            await self._write_all(writer, dialect, ask, feeds)
        except ConnectionError:
            # The reader is gone, or was too slow: nobody is left to tell.
            return response
        return response

    async def _write_all(
        self, writer: EventWriter, dialect: Dialect, ask: Ask, feeds: list[TurnFeed]
    ) -> None:
        await writer.write(ask.answer.begin(feeds))
        try:
            if len(feeds) == 1:
                await Follower(writer, ask, 0, feeds[0]).run()
            else:
                await follow_all([Follower(writer, ask, k, feed) for k, feed in enumerate(feeds)])
            await writer.write(ask.answer.close(feeds))
        except TurnError as error:
            await writer.write(dialect.broken(error))
        await writer.end()


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

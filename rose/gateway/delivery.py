"""Delivery of turns to connections: whole answers, or server-sent events of tokens as they come.

step by step ── the reader keeps up ──► pushed: written in the step in which the tokens came
     ▲                                     │ the reader is behind, or the turn is over
     └─────────────────────────────────────┘

Pushed events are written below aiohttp, as raw frames of HTTP's chunked encoding (`write_now`): an
event through `StreamResponse.write` is a coroutine, so each token of each turn would need a task to
be woken for it, a step of the event loop later. Everything else goes through aiohttp, which frames
the head, events that may have to wait, and the end.

A slow reader costs its connection's buffer and the turn's own tokens, nothing more: the turn runs
on, and the connection is closed if it takes nothing for `slow_reader_s`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

from aiohttp import HttpVersion11, web

from rose.gateway.apis.frontend import ApiFrontend, ApiRequest
from rose.gateway.errors import TurnError, fresh
from rose.gateway.stats import GatewayStats
from rose.gateway.turns.token_stream import TokenStream

EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
# Below this number of unsent bytes no connection is paused, so a write cannot wait.
UNWATCHED_BYTES = 16 << 10
# Largest event, which bounds the work that a slow reader can cause at once.
MAX_EVENT_TOKENS = 512


class Delivery:
    """Writer of one request's answer to its HTTP connection."""

    def __init__(
        self,
        http: web.Request,
        slow_reader_s: float,
        stats: GatewayStats,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Prepare the response with these further headers; a reader that takes nothing for
        `slow_reader_s` seconds is disconnected.
        """
        self._http = http
        self._slow_reader_s = slow_reader_s
        self._stats = stats
        self._headers = headers
        self._response = web.StreamResponse(headers=EVENT_STREAM)
        self._response.headers.update(headers)
        # Readers with HTTP/1.0 get no chunks: the framework does all writing.
        self._chunked = http.version >= HttpVersion11
        self._begun = False

    async def whole(self, body: bytes) -> web.Response:
        """Return the response with this JSON body; a long one is already sent, with a limit on a
        slow reader.
        """
        response = web.Response(body=body, content_type="application/json", headers=self._headers)
        if len(body) > UNWATCHED_BYTES:
            try:
                async with self._patience():
                    await response.prepare(self._http)
                    await response.write_eof()
            except ConnectionError:
                # The reader is gone, or was too slow.
                return response
        return response

    async def stream(
        self, frontend: ApiFrontend, ask: ApiRequest, feeds: Sequence[TokenStream]
    ) -> web.StreamResponse:
        """Send all turns as server-sent events until they are over, and return the response. Raises
        a turn's TurnError only before the first byte.
        """
        seen = [min(ask.resume_from, len(feed.tokens)) for feed in feeds]
        await _any_news(feeds, seen)
        for feed in feeds:
            if feed.error is not None and not feed.tokens:
                raise feed.error
        try:
            if self._chunked:
                self._response.enable_chunked_encoding()
            await self._response.prepare(self._http)
            await self._write_all(frontend, ask, feeds)
            await self._response.write_eof()
        except ConnectionError:
            # The reader is gone, or was too slow.
            return self._response
        return self._response

    async def write(self, data: bytes) -> None:
        """Send these bytes, waiting for a slow reader. Raises ConnectionError if the reader is gone
        or too slow.
        """
        transport = self._transport()
        if not data:
            return
        self._begun = True
        if transport.get_write_buffer_size() + len(data) < UNWATCHED_BYTES:
            await self._response.write(data)
            return
        async with self._patience():
            await self._response.write(data)

    def write_now(self, data: bytes) -> bool:
        """Send these bytes without waiting and return True; return False, and send nothing, if that
        could wait.

        Raises ConnectionError if the reader is gone.
        """
        transport = self._transport()
        unsent = transport.get_write_buffer_size() + len(data)
        if not (self._begun and self._chunked and data) or unsent >= UNWATCHED_BYTES:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def _write_all(
        self, frontend: ApiFrontend, ask: ApiRequest, feeds: Sequence[TokenStream]
    ) -> None:
        # A reader that resumes has received the start already.
        await self.write(b"" if ask.resume_from else ask.answer.begin(feeds))
        try:
            if len(feeds) == 1:
                await _Follower(self, ask, 0, feeds[0]).run()
            else:
                await _follow_all([_Follower(self, ask, k, feed) for k, feed in enumerate(feeds)])
            await self.write(ask.answer.close(feeds))
        except TurnError as error:
            await self.write(frontend.broken(error))

    def _transport(self) -> asyncio.Transport:
        transport = self._http.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the reader is gone")
        return transport

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """Return a context manager that closes the connection, and raises ConnectionError, if its
        body takes longer than `slow_reader_s`.
        """
        try:
            async with asyncio.timeout(self._slow_reader_s):
                yield
        except TimeoutError as expired:
            self._stats.slow_readers += 1
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError("the reader took nothing for too long") from expired


class _Follower:
    """Sender of one turn's events: it follows turn `index` of a request and writes its tokens to
    the connection.
    """

    def __init__(self, delivery: Delivery, ask: ApiRequest, index: int, feed: TokenStream) -> None:
        self._delivery = delivery
        self._ask = ask
        self._index = index
        self._feed = feed
        self._at = ask.resume_from
        # Eight logprobs of other tokens are about as many bytes as a token.
        self._most = max(1, MAX_EVENT_TOKENS // (1 + ask.turns[index].sampling.logprobs // 8))
        self._stopped: asyncio.Future[Exception | None] | None = None

    async def run(self) -> None:
        """Send the turn's events until it ends. Raises TurnError and ConnectionError."""
        feed = self._feed
        while True:
            await feed.beyond(self._at)
            end = min(len(feed.tokens), self._at + self._most)
            if feed.error is None or end > self._at:
                await self._delivery.write(self._event(end))
            self._at = end
            if len(feed.tokens) > end:
                continue
            if feed.over:
                if feed.error is not None:
                    raise feed.error
                return
            await self._pushed()

    async def _pushed(self) -> None:
        """Send tokens in the step in which they come, until a write could wait or the end."""
        self._stopped = asyncio.get_running_loop().create_future()
        self._feed.listen(self._push)
        try:
            error = await self._stopped
        finally:
            self._feed.unlisten(self._push)
        if error is not None:
            raise fresh(error)

    def _push(self) -> None:
        """Send the tokens that are new now; stop pushing if the write could wait or the turn is
        over.
        """
        feed, stopped = self._feed, self._stopped
        assert stopped is not None
        if stopped.done():
            return
        end = len(feed.tokens)
        try:
            if feed.over or end - self._at > self._most:
                stopped.set_result(None)
            elif end > self._at:
                if self._delivery.write_now(self._event(end)):
                    self._at = end
                else:
                    stopped.set_result(None)
        except Exception as error:  # noqa: BLE001 - the reader's, not the feed's
            stopped.set_result(fresh(error))

    def _event(self, end: int) -> bytes:
        event = self._ask.answer.part(self._index, self._feed, min(self._at, end), end)
        return b"id: %d\n%b" % (end, event) if self._ask.event_ids else event


async def _any_news(feeds: Sequence[TokenStream], seen: list[int]) -> None:
    """Wait until any of the turns has more tokens than `seen` says, or is over."""
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


async def _follow_all(followers: Sequence[_Follower]) -> None:
    """Run all followers of one request at the same time. Raises the first error, after the others
    are cancelled.

    A TaskGroup would tie tasks, errors and frames into cycles that only the collector frees.
    """
    tasks = [asyncio.create_task(follower.run()) for follower in followers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in done if (error := task.exception()) is not None]
        failed = fresh(errors[0]) if errors else None
        del errors
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed is not None:
        raise fresh(failed)

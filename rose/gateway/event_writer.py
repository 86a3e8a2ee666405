"""Writes events to one connection: at once where the reader keeps up, else waiting, with patience.

A reader that is slow costs its connection's buffer and the turn's own tokens, nothing more: the
turn runs on, and the connection is closed when it takes nothing for `slow_reader_s`.
"""

import asyncio

from aiohttp import HttpVersion11, web

from rose.gateway.stats import GatewayStats

# With less than this unsent no connection is paused, so a write cannot wait and needs no clock.
UNWATCHED_BYTES = 16 << 10


class EventWriter:
    """One response, from its head to its end. Raises ConnectionError when its reader is gone."""

    def __init__(
        self,
        http: web.Request,
        response: web.StreamResponse,
        slow_reader_s: float,
        stats: GatewayStats,
    ) -> None:
        self._http = http
        self._response = response
        self._slow_reader_s = slow_reader_s
        self._stats = stats
        # Without chunks, to readers that speak HTTP/1.0, all writing is left to the framework.
        self._chunked = http.version >= HttpVersion11
        self._begun = False

    async def begin(self) -> None:
        """Write the head, or keep it for the first event."""
        if self._chunked:
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._http)

    async def write(self, data: bytes) -> None:
        """Write, waiting for a reader that is behind."""
        transport = self._transport()
        if not data:
            return
        self._begun = True
        if transport.get_write_buffer_size() + len(data) < UNWATCHED_BYTES:
            await self._response.write(data)
            return
        async with Patience(self._http, self._slow_reader_s, self._stats):
            await self._response.write(data)

    def write_now(self, data: bytes) -> bool:
        """Write without waiting; False, having written nothing, where that cannot be."""
        transport = self._transport()
        unsent = transport.get_write_buffer_size() + len(data)
        if not (self._begun and self._chunked and data) or unsent >= UNWATCHED_BYTES:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def end(self) -> None:
        """Write what ends a response."""
        await self._response.write_eof()

    def _transport(self) -> asyncio.Transport:
        transport = self._http.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the reader is gone")
        return transport


class Patience:
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

"""Connections to engines: each has one request at a time, and is in a pool between requests.

    idle ── ask ──► answering ── the answer's end ──► idle, or closed if the engine says so
      └─ unused for REUSE_S, or the engine hangs up: closed

The answer is forwarded to its caller in its original bytes. A parser reads them beside that, and
finds the answer's end.
"""

import asyncio
from collections import defaultdict
from typing import Final, Protocol, cast

import httptools

LOOPBACK: Final = "127.0.0.1"
# An engine's server hangs up after 5 s without a request, and may be about to.
REUSE_S: Final = 3.0
CONNECT_S: Final = 2.0
MOST_IDLE: Final = 256


class AnswerSink(Protocol):
    """Receiver of an answer. Its methods must not wait."""

    def answer(self, data: bytes) -> None:
        """Take more of the answer."""
        ...

    def answered(self, *, last: bool) -> None:
        """Take the end of the answer. last: the answer itself ends the connection."""
        ...

    def broken(self) -> None:
        """Take the news that the answer breaks off here."""
        ...

    def hold(self, held: bool) -> None:
        """Pause the request while the engine's socket is full, or resume it."""
        ...


class EngineConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, idle: list["EngineConnection"]) -> None:
        self._idle = idle
        self._sink: AnswerSink | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._transport: asyncio.Transport | None = None
        self._whole = self._last = False
        self.idle_since_s = 0.0

    # ---- for whoever asks ----

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, sink: AnswerSink, head: bytes) -> None:
        """Begin a request; `sink` gets its answer."""
        self._sink = sink
        self._whole = self._last = False
        self._parser = httptools.HttpResponseParser(self)
        self.write(head)

    def write(self, data: bytes) -> None:
        """Send more of the request."""
        if self._transport is not None:
            self._transport.write(data)

    def hold(self, held: bool) -> None:
        """Pause the answer while the caller's socket is full, or resume it."""
        if self._transport is None or self._transport.is_closing():
            return
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """Hang up: the engine's work for this request ends."""
        self._sink = self._parser = None
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio's protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._sink is None or self._parser is None:
            # An unrequested answer: the engine's connection is not to be reused.
            self._forget()
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._break()
            return
        self._sink.answer(data)
        if self._whole:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        self._break()

    def pause_writing(self) -> None:
        if self._sink is not None:
            self._sink.hold(True)

    def resume_writing(self) -> None:
        if self._sink is not None:
            self._sink.hold(False)

    # ---- the parser's callback ----

    def on_message_complete(self) -> None:
        assert self._parser is not None
        # A moment later the parser no longer knows it.
        self._whole, self._last = True, not self._parser.should_keep_alive()

    # ---- inside ----

    def _end(self) -> None:
        sink = self._sink
        assert sink is not None
        self._sink = self._parser = None
        if self.is_open and not self._last and len(self._idle) < MOST_IDLE:
            self.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(self)
        else:
            self.close()
        sink.answered(last=self._last)

    def _break(self) -> None:
        sink = self._sink
        self.close()
        if sink is not None:
            sink.broken()

    def _forget(self) -> None:
        if self in self._idle:
            self._idle.remove(self)


class EnginePool:
    """Idle connections by the port of their engine. End with `close`."""

    def __init__(self) -> None:
        self._idle: dict[int, list[EngineConnection]] = defaultdict(list)

    def take(self, port: int) -> EngineConnection | None:
        """Return the open connection that was used last; None without one."""
        idle = self._idle[port]
        since_s = asyncio.get_running_loop().time() - REUSE_S
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since_s >= since_s:
                return connection
            connection.close()
        return None

    async def connect(self, port: int) -> EngineConnection:
        """Return a new connection. Raises OSError if nothing listens, TimeoutError."""
        loop, connection = asyncio.get_running_loop(), EngineConnection(self._idle[port])
        async with asyncio.timeout(CONNECT_S):
            await loop.create_connection(lambda: connection, LOOPBACK, port)
        return connection

    def close(self) -> None:
        """Hang up every idle connection."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

"""Connections to engines: each has one request at a time, and lies in a pool between requests.

    idle ── ask ──► answering ── the answer's end ──► idle, or closed if the engine says so
      └─ unused for REUSE_S, or the engine hangs up: closed

The answer goes to its caller in the bytes in which it came. A parser reads them beside that, and
says where the answer ends.
"""

import asyncio
from collections import defaultdict
from typing import Final, Protocol, cast

import httptools

LOOPBACK: Final = "127.0.0.1"
# An engine's server hangs up after 5 s without a request: one that just does so takes no more.
REUSE_S: Final = 3.0
CONNECT_S: Final = 2.0
MOST_IDLE: Final = 256


class AnswerSink(Protocol):
    """Receiver of an answer. Its methods must not wait."""

    def answer(self, data: bytes) -> None:
        """More of the answer came."""
        ...

    def answered(self, *, last: bool) -> None:
        """The answer is complete. last: it says itself that its connection ends with it."""
        ...

    def broken(self) -> None:
        """The answer breaks off here."""
        ...

    def hold(self, held: bool) -> None:
        """The engine takes no more of the request just now, or does again."""
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
        """Begin a request; `sink` hears of its answer."""
        self._sink = sink
        self._whole = self._last = False
        self._parser = httptools.HttpResponseParser(self)
        self.write(head)

    def write(self, data: bytes) -> None:
        """More of the request."""
        if self._transport is not None:
            self._transport.write(data)

    def hold(self, held: bool) -> None:
        """The caller takes no more of the answer just now, or does again."""
        if self._transport is None or self._transport.is_closing():
            return
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """Hang up: whatever the engine does for this request ends."""
        self._sink = self._parser = None
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio's protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._sink is None or self._parser is None:
            # An answer to nothing: whatever speaks there, it is not to be asked again.
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
        # A moment later the parser knows it no more.
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
        """A connection that is open, the one that was used last; None where there is none."""
        idle = self._idle[port]
        since_s = asyncio.get_running_loop().time() - REUSE_S
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since_s >= since_s:
                return connection
            connection.close()
        return None

    async def connect(self, port: int) -> EngineConnection:
        """A new connection. Raises OSError where nobody listens, TimeoutError."""
        loop, connection = asyncio.get_running_loop(), EngineConnection(self._idle[port])
        async with asyncio.timeout(CONNECT_S):
            await loop.create_connection(lambda: connection, LOOPBACK, port)
        return connection

    def close(self) -> None:
        """Hang up wherever nothing is awaited."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

"""HTTP/1.1 connections that are kept, whose answers are pushed to a receiver as they arrive.

    idle ── begin ──► answering ── the answer's end ──► idle, or closed if the server says so
      └─ unused for `idle_s`, or the server hangs up: closed

An HTTP client with streams to read from would make every token wait for another turn of the event
loop before it reaches its reader; with thousands of streams each such turn takes milliseconds.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import httptools

CONNECT_S = 2.0
R = TypeVar("R")


class HttpConnection(asyncio.Protocol, Generic[R]):
    """HTTP/1.1 connection with one request at a time, whose answer goes to the request's receiver.

    Between requests it is idle. A subclass passes the answer on to the receiver: in callbacks of
    httptools, or in `took`.
    """

    # Servers of engines hang up after 5 s without a request, and may be about to.
    idle_s = 3.0
    """Seconds without a request after which the connection is closed."""
    most_idle = 4_096

    def __init__(self, idle: "list[Any]") -> None:
        """Create an unconnected protocol.

        idle: its pool's list of connections without a request.
        """
        self._idle = idle
        self._receiver: R | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._given_up = self._whole = self._last = False

    @property
    def is_open(self) -> bool:
        """True if the connection is made and not closing, so that a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_fresh(self) -> bool:
        """True if it is open, and not idle for so long that the server may be closing it."""
        now_s = asyncio.get_running_loop().time()
        return self.is_open and (self._timer is None or now_s < self._timer.when())

    def begin(self, receiver: R, data: bytes) -> None:
        """Send a request, or its beginning; `receiver` gets the answer."""
        self.close_after(None)
        self._receiver = receiver
        self._whole = self._last = False
        self._parser = httptools.HttpResponseParser(self)
        self.write(data)

    def write(self, data: bytes) -> None:
        """Send more bytes of the request; do nothing if the connection is closed."""
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Abort the connection, which ends the server's work; the receiver gets no end."""
        self.close_after(None)
        # Parser and connection reference each other.
        self._receiver = self._parser = None
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """Close a connection that is no longer waited for; it may or may not be open.

        A transport closed at that moment may never report it, and the two would keep each other.
        """
        self._given_up = True
        self.close()
        self._transport = None

    def close_after(self, seconds: float | None) -> None:
        """Close the connection in that many seconds, unless a request begins; None cancels that."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(seconds, self.close)

    # ---- for subclasses ----

    def took(self, receiver: R, data: bytes) -> None:
        """Handle the answer's next bytes, which the parser has read; a subclass may override it."""

    def ended(self, receiver: R, error: Exception | None) -> None:
        """Handle the answer's end, whole or broken off by `error`; a subclass must override it."""
        raise NotImplementedError

    # ---- asyncio's protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._given_up:
            self.give_up()

    def data_received(self, data: bytes) -> None:
        if self._receiver is None or self._parser is None:
            # An unrequested answer: the server is not to be trusted any more.
            self._fail(ConnectionError("an answer without a request"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._whole:
                callback = isinstance(error, httptools.HttpParserCallbackError)
                self._fail(cast(Exception, error.__context__) if callback else error)
                return
            self._last = True
        if self._receiver is not None:
            self.took(self._receiver, data)
        if self._whole:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionError("the connection was closed before the answer's end"))

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        if self._whole:
            raise ConnectionError("an answer without a request")

    def on_message_complete(self) -> None:
        # A moment later the parser no longer knows it.
        self._whole = True
        self._last = self._parser is None or not self._parser.should_keep_alive()

    # ---- inside ----

    def _end(self) -> None:
        receiver, self._receiver, self._parser = self._receiver, None, None
        if receiver is None:
            return
        if self.is_open and not self._last and len(self._idle) < self.most_idle:
            self._idle.append(self)
            self.close_after(self.idle_s)
        else:
            self.close()
        self.ended(receiver, None)

    def _fail(self, error: Exception) -> None:
        receiver = self._receiver
        self.close()
        if self in self._idle:
            self._idle.remove(self)
        if receiver is not None:
            self.ended(receiver, error)


K = TypeVar("K")
C = TypeVar("C", bound="HttpConnection[Any]")


class HttpPool(Generic[K, C]):
    """Idle HTTP connections by server, for reuse; end with `close`.

    make: returns a new connection, which enters the given list while it is idle.
    """

    def __init__(self, make: Callable[[list[C]], C]) -> None:
        self._make = make
        self._idle: dict[K, list[C]] = defaultdict(list)

    def take(self, server: K) -> C | None:
        """Remove and return the open idle connection that was used last; None without one."""
        idle = self._idle[server]
        while idle:
            connection = idle.pop()
            if connection.is_fresh:
                return connection
            connection.close()
        return None

    async def connect(
        self,
        server: K,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> C:
        """Return a new connection, made within CONNECT_S.

        Raises OSError, TimeoutError, and ValueError for an invalid host.
        """
        loop, connection = asyncio.get_running_loop(), self._make(self._idle[server])
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(
                    lambda: connection, host, port, ssl=tls, server_hostname=server_name
                )
        except BaseException:
            connection.give_up()
            raise
        return connection

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

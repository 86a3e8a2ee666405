"""A caller over a bare socket: asks, reads answers, hangs up when it is told to.

An HTTP client would keep connections, retry and leave garbage of its own in the process that a
test looks at.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, cast

LAST_CHUNK = b"0\r\n\r\n"
HUNG_UP = 0


class Answer(NamedTuple):
    """`status` is HUNG_UP where the connection ended before the answer did, whoever ended it."""

    status: int
    body: bytes


class Caller:
    """One connection, one request at a time; it is opened anew when it was closed."""

    def __init__(self, port: int, on_data: Callable[[float], None] | None = None) -> None:
        self._port = port
        self._on_data = on_data
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._data = b""
        self._wanted = -1

    async def ask(
        self,
        path: str,
        body: bytes,
        hang_up_after_s: float | None = None,
        hang_up_at: bytes = b"",
        method: str = "POST",
    ) -> Answer:
        """Send a request and return its answer.

        `hang_up_after_s` seconds, or at `hang_up_at` in what came, the connection is closed.
        """
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: _Line(self), "127.0.0.1", self._port)
        assert self._transport is not None
        waiting: asyncio.Future[Answer] = loop.create_future()
        self._waiting = waiting
        self._data, self._wanted, self._leave_at = b"", -1, hang_up_at
        self._transport.write(
            b"%b %b HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (method.encode(), path.encode(), len(body), body)
        )
        timer = None
        if hang_up_after_s is not None:
            timer = loop.call_later(hang_up_after_s, self.hang_up)
        answer = await waiting
        if timer is not None:
            timer.cancel()
        return answer

    def hang_up(self) -> None:
        """Close the connection, whatever it still waits for."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._answer(HUNG_UP)

    def opened(self, transport: asyncio.Transport) -> None:
        """There is a connection."""
        self._transport = transport

    def lost(self, transport: asyncio.Transport) -> None:
        """A connection is gone; it may be an earlier one."""
        if transport is self._transport:
            self.hang_up()

    def received(self, data: bytes) -> None:
        """More of the answer."""
        if self._on_data is not None:
            self._on_data(time.monotonic())
        self._data += data
        if self._leave_at and self._leave_at in self._data:
            self.hang_up()
            return
        head, mark, body = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        if self._wanted < 0:
            _, counted, rest = head.lower().partition(b"content-length: ")
            self._wanted = int(rest.split(b"\r\n", 1)[0]) if counted else 0
        whole = len(body) >= self._wanted if self._wanted else body.endswith(LAST_CHUNK)
        if whole:
            self._data = body
            self._answer(int(head.split(b" ", 2)[1]))

    def _answer(self, status: int) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(Answer(status, self._data))


class _Line(asyncio.Protocol):
    """One connection of a caller."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._caller.opened(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._caller.lost(self._transport)
        del self._transport

    def data_received(self, data: bytes) -> None:
        self._caller.received(data)

"""HTTP/1.1 client over a bare socket: one connection, one request at a time.

An HTTP library would keep connections, retry and leave garbage of its own in the process that is
measured or looked at.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

LAST_CHUNK = b"0\r\n\r\n"
HUNG_UP = 0
# Kept of an answer whose pieces go to a callback: its end mark, and what an error says.
_TAIL_BYTES = 200

# The context of a new connection, and the name that its server has to prove.
Tls = Callable[[], tuple[ssl.SSLContext, str]]


class HttpAnswer(NamedTuple):
    """`status` is HUNG_UP where the connection ended before the answer did, whoever ended it."""

    status: int
    body: bytes


def request_of(path: str, body: bytes, method: str = "POST", more_head: bytes = b"") -> bytes:
    """Return the bytes of one request; `more_head`: further lines of its head, with their ends."""
    return (
        b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%b\r\n%b"
        % (method.encode(), path.encode(), len(body), more_head, body)
    )


class HttpCaller:
    """One connection to `url`, opened when it is needed and anew after it was closed.

    on_body: called with each piece of an answer's body, chunk marks included, and the time of its
    arrival; the answer then keeps only its end.
    """

    def __init__(
        self,
        url: str,
        on_body: Callable[[bytes, float], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._tls = tls if address.scheme == "https" else None
        self.on_body = on_body
        self._transport: asyncio.Transport | None = None
        self._pending: asyncio.Future[HttpAnswer] | None = None
        self._body = self._hang_up_at = b""
        self._status, self._missing = 0, -1

    async def open(self) -> None:
        """Connect, unless it is connected. Raises OSError."""
        if self._transport is None:
            context, name = self._tls() if self._tls else (None, None)
            await asyncio.get_running_loop().create_connection(
                lambda: _Line(self), self._host, self._port, ssl=context, server_hostname=name
            )

    async def ask(
        self, request: bytes, *, hang_up_after_s: float | None = None, hang_up_at: bytes = b""
    ) -> HttpAnswer:
        """Send a request and return its answer.

        The connection is closed after `hang_up_after_s` seconds, or at `hang_up_at` in an answer.
        """
        await self.open()
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        pending: asyncio.Future[HttpAnswer] = loop.create_future()
        self._pending = pending
        self._body, self._hang_up_at = b"", hang_up_at
        self._status, self._missing = 0, -1
        self._transport.write(request)
        timer = None
        if hang_up_after_s is not None:
            timer = loop.call_later(hang_up_after_s, self.hang_up)
        answer = await pending
        if timer is not None:
            timer.cancel()
        return answer

    async def post(self, path: str, body: bytes, **how: Any) -> HttpAnswer:  # noqa: ANN401 - as ask's
        """Post a JSON body, as `ask`."""
        return await self.ask(request_of(path, body), **how)

    async def get(self, path: str) -> HttpAnswer:
        """Get a path, as `ask`."""
        return await self.ask(request_of(path, b"", "GET"))

    def hang_up(self) -> None:
        """Close the connection, whatever it still waits for."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._answer(HUNG_UP)

    def opened(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def lost(self, transport: asyncio.Transport) -> None:
        """Take note that a connection has ended; it may be an earlier one."""
        if transport is self._transport:
            self.hang_up()

    def received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._pending is None:
            return
        if not self._status:
            head, mark, data = (self._body + data).partition(b"\r\n\r\n")
            if not mark:
                self._body = head
                return
            self._body = b""
            _, counted, rest = head.lower().partition(b"content-length: ")
            self._missing = int(rest.split(b"\r\n", 1)[0]) if counted else -1
            self._status = int(head.split(b" ", 2)[1])
        chunked = self._missing < 0
        self._body += data
        if not chunked:
            self._missing = max(0, self._missing - len(data))
        over = self._body.endswith(LAST_CHUNK) if chunked else self._missing == 0
        if self.on_body is not None:
            if data:
                self.on_body(data, now_s)
            self._body = self._body[-_TAIL_BYTES:]
        if self._hang_up_at and self._hang_up_at in self._body:
            self.hang_up()
        elif over:
            self._answer(self._status)

    def _answer(self, status: int) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done():
            pending.set_result(HttpAnswer(status, self._body))


class _Line(asyncio.Protocol):
    """One connection of a caller."""

    def __init__(self, caller: HttpCaller) -> None:
        self._caller = caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._caller.opened(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._caller.lost(self._transport)
        del self._transport

    def data_received(self, data: bytes) -> None:
        self._caller.received(data)

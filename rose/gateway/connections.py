"""Connections of callers: how many there may be, and how long each may take over what.

    head ── its first line and headers are whole ──► busy ── answered ──► idle ──► head …
      │ not within `head_timeout_s`: closed            │ body late: 408     │ for `IDLE_S`: closed
      └──────────────── one too many came: the idle one of longest is closed for it, else the one
                        that owes its head for longest, else the new one is told 503

aiohttp has no time limit for heads and none for bodies, and takes connections as long as there are
descriptors; without these bounds idle connections alone keep a gateway from its replicas.
"""

import asyncio
import resource
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from rose.gateway.apis.wire import vllm_error
from rose.gateway.errors import BadRequest, NoReplica, TurnError
from rose.gateway.request_limits import LimitLog

IDLE_S = 300.0
# A connection that is younger than this is not closed for another's sake: its head may be near.
HEAD_GRACE_S = 1.0
# For replicas, the scheduler, logs and whatever else the process has open.
SPARE_DESCRIPTORS = 64
MAX_CONNECTIONS = 32_768
JSON = "application/json"


def connections_allowed() -> int:
    """As many as leave each of them a descriptor for a replica's connection."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, (soft - SPARE_DESCRIPTORS) // 2))


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * MAX_CONNECTIONS + SPARE_DESCRIPTORS
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connections:
    """All connections of one gateway; `clock` gives monotonic seconds. `sweep` it now and then."""

    def __init__(
        self,
        capacity: int,
        head_timeout_s: float,
        limits: LimitLog,
        clock: Callable[[], float],
    ) -> None:
        self._capacity = capacity
        self._head_timeout_s = head_timeout_s
        self._limits = limits
        self._clock = clock
        self._all: set[Connection] = set()
        # Oldest first, each with the time since when it is so.
        self._heads: dict[Connection, float] = {}
        self._idle: dict[Connection, float] = {}

    def __len__(self) -> int:
        """Connections now."""
        return len(self._all)

    @property
    def idle(self) -> int:
        """Those that wait for their callers' next request."""
        return len(self._idle)

    def admit(self, connection: "Connection") -> bool:
        """Whether a new connection may stay; another one may be closed for it."""
        if len(self._all) >= self._capacity and not self._make_room():
            return False
        self._all.add(connection)
        self._heads[connection] = self._clock()
        return True

    def heard(self, connection: "Connection") -> None:
        """Bytes came: of a new request, if the connection was idle."""
        if self._idle.pop(connection, None) is not None:
            self._heads[connection] = self._clock()

    def began(self, connection: "Connection") -> None:
        """A request's head is whole."""
        self._heads.pop(connection, None)
        self._idle.pop(connection, None)

    def answered(self, connection: "Connection") -> None:
        """Its request is over."""
        if connection in self._all:
            self._idle[connection] = self._clock()

    def lost(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self._heads.pop(connection, None)
        self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Close what takes too long."""
        now_s = self._clock()
        for waiting, limit_s, name in (
            (self._heads, self._head_timeout_s, "head_timeout_s"),
            (self._idle, IDLE_S, ""),
        ):
            late = []
            for connection, since_s in waiting.items():
                if now_s - since_s <= limit_s:
                    break
                late.append(connection)
            for connection in late:
                self._close(connection)
            if late and name:
                self._limits.bites(name, len(late))

    def _make_room(self) -> bool:
        self._limits.bites("max_connections", 1)
        for connection in self._idle:
            # What was answered last may still lie in its buffer.
            self.lost(connection)
            connection.hang_up()
            return True
        for connection, since_s in self._heads.items():
            if self._clock() - since_s < HEAD_GRACE_S:
                return False
            self._close(connection)
            return True
        return False

    def _close(self, connection: "Connection") -> None:
        self.lost(connection)
        connection.abort()


class Connection(web.RequestHandler):
    """One connection: aiohttp's, which tells `Connections` how far it is."""

    __slots__ = ("_book", "_refused", "_socket")

    def __init__(self, server: web.Server, book: Connections) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_S,
            access_log=cast(Any, None),
            # Compressed bodies are refused; nothing may be inflated before that is seen.
            auto_decompress=False,
        )
        self._book = book
        self._refused = False
        self._socket: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        if self._book.admit(self):
            super().connection_made(transport)
            return
        self._refused = True
        self._socket.write(_too_many())
        self._socket.close()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self._book.heard(self)
            super().data_received(data)

    def connection_lost(self, error: BaseException | None) -> None:
        self._book.lost(self)
        if not self._refused:
            super().connection_lost(error)

    def began(self) -> None:
        """A request of this connection is handled from now on."""
        self._book.began(self)

    def answered(self) -> None:
        self._book.answered(self)

    def hang_up(self) -> None:
        """Close when what was written is sent."""
        if self._socket is not None:
            self._socket.close()

    def abort(self) -> None:
        """Close at once."""
        if self._socket is not None:
            self._socket.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP in the shape of every other error, and close."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        first = " ".join((message or "malformed").split())[:200]
        error = BadRequest(f"this is no HTTP that the gateway reads: {first}")
        response = web.Response(status=status, body=vllm_error(error), content_type=JSON)
        response.force_close()
        return response


def _too_many() -> bytes:
    error = NoReplica("too many connections are open; send the turn again later")
    return _closing(error)


def _closing(error: TurnError) -> bytes:
    body = vllm_error(error)
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\nContent-Type: {JSON}\r\n"
        f"Retry-After: {error.retry_after_s}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body

"""HTTP ports: the limits that every port of ROSE has on connections, heads, bodies and browsers.

    head ── its first line and headers are whole ──► busy ── answered ──► idle ──► head …
      │ not within `head_timeout_s`: closed            │ body late: 408     │ for `IDLE_S`: closed
      └──────────────── one too many: the connection idle for longest is closed, else the one
                        whose head is due for longest, else the new one is answered with 503

aiohttp has no time limit for heads or bodies, and accepts connections as long as there are
descriptors; without these bounds idle connections alone take all of a process's descriptors.

`check_browser` refuses, on loopback, a request that a page of another site has a browser send: a
foreign `Host` (DNS rebinding) or `Origin`, and bodies of the types that need no preflight (CORS).

`LimitLog` reports a limit when it is first reached and when that is over, not each time between:

quiet ── reached ──► logged once ── nothing for `QUIET_S` ──► logged how often, quiet again
"""

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

from aiohttp import web

from rose.addresses import bound, is_loopback
from rose.errors import ConfigError

IDLE_S = 300.0
HEAD_S: Final = 10.0
BODY_S: Final = 20.0
SWEEP_S: Final = 0.5
BACKLOG: Final = 1_024
# Connections accepted in one step of the event loop.
ACCEPTS: Final = 64
# A younger connection is not closed to make room: its head may be on its way.
HEAD_GRACE_S = 1.0
# Descriptors kept for replicas, the scheduler, logs and other files of the process.
SPARE_DESCRIPTORS = 64
MAX_CONNECTIONS = 32_768
# A process has two ports of this kind at most, and both must leave it descriptors.
MAX_SIDE_CONNECTIONS: Final = 1_024
JSON = "application/json"
QUIET_S = 10.0
RECORDS_A_MINUTE: Final = 20
MINUTE_S: Final = 60.0
FORM_TYPES: Final = frozenset(
    {"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"}
)
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Around = Callable[[web.BaseRequest, Answer], Awaitable[web.StreamResponse]]
ErrorBody = Callable[[int, str], bytes]


class LimitLog:
    """Reporter of the limits that a process reaches: one event at first, one when that is over.

    `say` is called as `say(event, limit=…, times=…)`, with the limit's option name; `clock` gives
    monotonic seconds.
    """

    def __init__(self, say: Callable[..., None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        # Times since the limit was first reached, and when it was last.
        self._bouts: dict[str, tuple[int, float]] = {}

    def bites(self, limit: str, times: int = 1) -> None:
        """Count something that was refused or closed because of a limit; report the first time."""
        if limit not in self._bouts:
            self._say("limit_reached", limit=limit, times=times)
        earlier, _ = self._bouts.get(limit, (0, 0.0))
        self._bouts[limit] = earlier + times, self._clock()

    def sweep(self) -> None:
        """Report the limits that were not reached for QUIET_S, and forget them."""
        now_s = self._clock()
        for limit, (times, last_s) in list(self._bouts.items()):
            if now_s - last_s > QUIET_S:
                del self._bouts[limit]
                self._say("limit_over", limit=limit, times=times)


def connections_allowed() -> int:
    """Return the most connections that leave each a second descriptor, for a replica."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, (soft - SPARE_DESCRIPTORS) // 2))


def raise_descriptor_limit() -> None:
    """Raise this process's descriptor limit as far as it may, up to what MAX_CONNECTIONS need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * MAX_CONNECTIONS + SPARE_DESCRIPTORS
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Bounded(Protocol):
    """Interface of a connection: `abort` closes it at once, `hang_up` after its pending data."""

    def hang_up(self) -> None: ...
    def abort(self) -> None: ...


class Connections:
    """All connections of one port, with bounds on their number and times; `Listener` sweeps it."""

    def __init__(
        self,
        capacity: int,
        head_timeout_s: float,
        limits: LimitLog,
        clock: Callable[[], float],
        error_body: ErrorBody = lambda status, line: json.dumps(
            {"error": {"message": line, "code": status}}
        ).encode(),
        idle_s: float = IDLE_S,
    ) -> None:
        """Create the record of a port without connections; `clock` gives monotonic seconds.

        error_body: returns the body of an error answer outside of any route, for a status and a
        line.
        """
        self.error_body = error_body
        self.capacity = capacity
        self.head_timeout_s = head_timeout_s
        self._idle_s = idle_s
        self.limits = limits
        self._clock = clock
        self._all: set[Bounded] = set()
        # Connections of each state, oldest first, with the time since when they are in it.
        self._heads: dict[Bounded, float] = {}
        self._idle: dict[Bounded, float] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def idle(self) -> int:
        """Number of connections that wait for their callers' next request."""
        return len(self._idle)

    def admit(self, connection: Bounded) -> bool:
        """Add a new connection and return True; return False if the port is full.

        In a full port the connection idle for longest, or the one whose head is due for longest, is
        closed for it.
        """
        if len(self._all) >= self.capacity and not self._make_room():
            return False
        self._all.add(connection)
        self._heads[connection] = self._clock()
        return True

    def heard(self, connection: Bounded) -> None:
        """Record received bytes: a new request's head begins if the connection was idle."""
        if self._idle.pop(connection, None) is not None:
            self._heads[connection] = self._clock()

    def began(self, connection: Bounded) -> None:
        """Record that a request's head is whole, so that no time limit of heads holds."""
        self._heads.pop(connection, None)
        self._idle.pop(connection, None)

    def answered(self, connection: Bounded) -> None:
        """Record that the connection's request is answered, so that it is idle."""
        if connection in self._all:
            self._idle[connection] = self._clock()

    def close(self) -> None:
        """Close all connections at once."""
        for connection in tuple(self._all):
            self._close(connection)

    def lost(self, connection: Bounded) -> None:
        self._all.discard(connection)
        self._heads.pop(connection, None)
        self._idle.pop(connection, None)

    def sweep(self) -> None:
        """Close the connections whose head or next request is late; report limits now over."""
        now_s = self._clock()
        for waiting, limit_s, name in (
            (self._heads, self.head_timeout_s, "head_timeout_s"),
            (self._idle, self._idle_s, ""),
        ):
            late = []
            for connection, since_s in waiting.items():
                if now_s - since_s <= limit_s:
                    break
                late.append(connection)
            for connection in late:
                self._close(connection)
            if late and name:
                self.limits.bites(name, len(late))
        self.limits.sweep()

    def _make_room(self) -> bool:
        self.limits.bites("max_connections", 1)
        for connection in self._idle:
            # Its buffer may still hold the last answer.
            self.lost(connection)
            connection.hang_up()
            return True
        for connection, since_s in self._heads.items():
            if self._clock() - since_s < HEAD_GRACE_S:
                return False
            self._close(connection)
            return True
        return False

    def _close(self, connection: Bounded) -> None:
        self.lost(connection)
        connection.abort()


class Connection(web.RequestHandler):
    """Connection of aiohttp's server, which reports its state to `Connections`."""

    __slots__ = ("_book", "_refused", "_socket")

    def __init__(self, server: web.Server, book: Connections) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_S,
            access_log=cast(Any, None),
            logger=_log,
            # Compressed bodies are refused; nothing may be inflated before that is checked.
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
        self._socket.write(_too_many(self._book.error_body))
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
        """Record that a request of this connection is being handled."""
        self._book.began(self)

    def answered(self) -> None:
        self._book.answered(self)

    def hang_up(self) -> None:
        """Close the connection after its written data is sent."""
        if self._socket is not None:
            self._socket.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._socket is not None:
            self._socket.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the error answer to bytes that are not HTTP; other errors are aiohttp's."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        first = " ".join((message or "malformed").split())[:200]
        line = self._book.error_body(status, f"this is no HTTP that the gateway reads: {first}")
        response = web.Response(status=status, body=line, content_type=JSON)
        response.force_close()
        return response


def _too_many(error_body: ErrorBody) -> bytes:
    body = error_body(503, "too many connections are open; send the turn again later")
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {JSON}\r\nRetry-After: 1\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _ClosedAtOnceError(BlockingIOError):
    """Error: a connection was accepted and closed at once; others may wait behind it."""


class BoundedSocket(socket.socket):
    """Listening socket that closes what it accepts beyond `capacity`, TLS handshakes included.

    asyncio writes a traceback for each connection that it cannot accept for lack of descriptors;
    one descriptor is kept for that case, with which the connection is taken and closed.
    """

    capacity = MAX_CONNECTIONS
    limits: LimitLog | None = None

    def __init__(self, *of: int) -> None:
        """Create an unbound socket and open the descriptor in reserve.

        of: family, type and protocol, as a socket's.
        """
        super().__init__(*of)
        self.accepted = 0
        self._reserve: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def full(self) -> bool:
        """True if the next connection would be closed at once."""
        return self.accepted >= self.capacity

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection and its peer's address.

        Raises BlockingIOError if none waits, or if the one that waited was closed at once.
        """
        try:
            descriptor, peer = cast(Any, self)._accept()
        except OSError as error:
            if error.errno not in _OUT_OF_RESOURCES:
                raise
            self._bites("descriptors")
            self._shed()
            raise _ClosedAtOnceError from error
        connection = _Counted(self.family, self.type, self.proto, fileno=descriptor)
        if self.full:
            connection.close()
            self._bites("max_connections")
            raise _ClosedAtOnceError
        connection.count_for(self)
        connection.setblocking(False)
        return connection, peer

    def close(self) -> None:
        """Close the socket, and the descriptor in reserve."""
        self._release_reserve()
        super().close()

    def _bites(self, limit: str) -> None:
        if self.limits is not None:
            self.limits.bites(limit)

    def _shed(self) -> None:
        """Accept and close the next connection, with the descriptor in reserve."""
        self._release_reserve()
        with contextlib.suppress(OSError):
            os.close(cast(Any, self)._accept()[0])
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _release_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None


class _Counted(socket.socket):
    """Accepted connection that its listening socket counts until it is closed."""

    _listening: BoundedSocket | None = None

    def count_for(self, listening: BoundedSocket) -> None:
        listening.accepted += 1
        self._listening = listening

    def close(self) -> None:
        self._uncount()
        super().close()

    def detach(self) -> int:
        # uvloop closes the descriptor itself, and detaches the socket then.
        self._uncount()
        return super().detach()

    def __del__(self) -> None:
        self._uncount()

    def _uncount(self) -> None:
        if self._listening is not None:
            self._listening.accepted -= 1
            self._listening = None


class Listener:
    """Listening sockets of one port, on any event loop; `bind` starts them, `close` ends them.

    uvloop's own servers accept in C, past `BoundedSocket`; and asyncio's servers do not know which
    TLS handshake is due for longest. Close to its bound a port ends that one for a new connection.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        book: Connections,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the listener without sockets.

        make: returns the protocol of a new connection, which reports its state to `book`.
        """
        self._make = make
        self._book = book
        self._tls = tls
        self._handshake_s = book.head_timeout_s if tls else None
        self.sockets: list[BoundedSocket] = []
        # Oldest first, each with the time at which it began.
        self._handshakes: dict[asyncio.Task[None], float] = {}
        self._sweeping: asyncio.Task[None] | None = None

    async def bind(self, host: str, port: int) -> None:
        """Listen on all addresses of a host. Raises OSError if one of them cannot be bound."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = BoundedSocket(family, kind, protocol)
                self.sockets.append(listening)
                # The spare descriptors let an answer of 503 still be sent.
                listening.capacity = self._book.capacity + SPARE_DESCRIPTORS // 4
                listening.limits = self._book.limits
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
                listening.setblocking(False)
                listening.listen(BACKLOG)
                loop.add_reader(listening, self._accept, listening)
        except BaseException:
            self.close()
            raise
        self._sweeping = loop.create_task(self._sweep())

    def close(self) -> None:
        """Stop listening and end running handshakes; other connections continue."""
        for listening in self.sockets:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self.sockets = []
        for task in (self._sweeping, *self._handshakes):
            if task is not None:
                task.cancel()

    def _accept(self, listening: BoundedSocket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS):
            if listening.full and self._end_handshakes():
                # Their descriptors are free in the loop's next round.
                return
            try:
                connection, _ = listening.accept()
            except (_ClosedAtOnceError, ConnectionAbortedError):
                continue
            except (BlockingIOError, InterruptedError):
                return
            task = loop.create_task(self._connect(connection))
            self._handshakes[task] = loop.time()
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _connect(self, connection: socket.socket) -> None:
        # A peer that breaks off a handshake, or is late, gets no answer and no log line.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )

    def _end_handshakes(self) -> bool:
        """Cancel the oldest handshakes, older than HEAD_GRACE_S; return True if there were any."""
        before_s = asyncio.get_running_loop().time() - HEAD_GRACE_S
        oldest = itertools.islice(self._handshakes.items(), ACCEPTS)
        late = [task for task, since_s in oldest if since_s <= before_s]
        for task in late:
            del self._handshakes[task]
            task.cancel()
        if late:
            self._book.limits.bites("max_connections", len(late))
        return bool(late)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._book.sweep()
            except Exception:  # noqa: BLE001 - whatever it is
                # Without sweeps late connections would stay for good.
                _log.exception("the next sweep closes what this one did not")


class FewRecords(logging.Filter):
    """Log filter that passes `most` records a minute, so that no peer fills a disk."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most: int = RECORDS_A_MINUTE
    ) -> None:
        super().__init__()
        self._most = most
        self._clock = clock
        self._minute_s = -MINUTE_S
        self._passed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if self._clock() - self._minute_s >= MINUTE_S:
            self._minute_s, self._passed = self._clock(), 0
        self._passed += 1
        return self._passed <= self._most


_log = logging.getLogger(__name__)
_log.addFilter(FewRecords())


def check_browser(http: web.BaseRequest) -> None:
    """Raise an HTTP error answer for a request that a page of another site has a browser send.

    For a port on loopback: a foreign `Host` or `Origin`, or a body that needs no preflight (a page
    cannot send `Authorization` without one).
    """
    if not is_loopback(_name_of("//" + http.headers.get("Host", ""))):
        raise web.HTTPMisdirectedRequest(
            reason="Foreign Host",
            text="ask for localhost, 127.0.0.1 or [::1]; other names may be anybody's\n",
        )
    origin = http.headers.get("Origin")
    if origin is not None and not is_loopback(_name_of(origin)):
        raise web.HTTPForbidden(
            reason="Foreign Origin", text="pages of other sites may not ask this port\n"
        )
    form = http.content_type in FORM_TYPES and "Authorization" not in http.headers
    if http.method != "GET" and http.body_exists and form:
        raise web.HTTPUnsupportedMediaType(
            reason="send Content-Type: application/json",
            text="send Content-Type: application/json\n",
        )


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


class HttpPort:
    """HTTP server of one aiohttp application, with bounds on connections, heads and bodies.

    Start it once, and close it.
    """

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        connections: Connections | None = None,
        around: Around | None = None,
        patience_s: float = 0.0,
        shutdown_s: float = 1.0,
    ) -> None:
        """Create the server, without binding its port; 0 takes any free one.

        around: called with each request and the route, and returns the answer. patience_s: time to
        wait for a used port. shutdown_s: time that running requests have at the end. A caller that
        passes `connections` bounds bodies itself.
        """
        self.port = port
        self._host = host
        self._tls = tls
        self._around = around
        self._connections = connections
        self._patience_s = patience_s
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_s
        )
        self._listener: Listener | None = None

    @property
    def server(self) -> web.Server:
        """aiohttp's server object; only after `start`."""
        server = self._runner.server
        assert server is not None
        return server

    async def start(self, refusal: str = "") -> None:
        """Bind the port and serve; set `port` to the bound number.

        Raises ConfigError if it cannot be bound. refusal: its text, with {} for the system's words.
        """
        raise_descriptor_limit()
        await self._runner.setup()
        book = self._connections
        if book is None:
            capacity = min(MAX_SIDE_CONNECTIONS, max(1, connections_allowed() // 2))
            clock = asyncio.get_running_loop().time
            book = Connections(capacity, HEAD_S, LimitLog(warn, clock), clock)
        make = guarded(self.server, book, self._around, local=is_loopback(self._host))
        listener = Listener(make, book, self._tls)
        try:
            await bound(lambda: listener.bind(self._host, self.port), self._patience_s)
        except BaseException as error:
            await self._runner.cleanup()
            if not isinstance(error, OSError):
                raise
            if not refusal and error.errno == errno.EADDRINUSE:
                refusal = f"port {self.port} of {self._host} is in use; give another --port"
            refusal = refusal or f"cannot listen on {self._host}: {{}}"
            raise ConfigError(refusal.replace("{}", str(error.strerror))) from error
        self._listener = listener
        self.port = listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and end the connections."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


def guarded(
    server: web.Server, book: Connections, around: Around | None = None, *, local: bool = False
) -> Callable[[], Connection]:
    """Make `server` report its requests to `book`; return the factory of its connections.

    local: the port is on loopback, so `check_browser` is applied. around: as in `HttpPort`; without
    it a body is read here, within BODY_S.
    """
    routed = server.request_handler

    async def route(http: web.BaseRequest) -> web.StreamResponse:
        if local:
            check_browser(http)
        if around is None and http.body_exists:
            try:
                async with asyncio.timeout(BODY_S):
                    await http.read()
            except TimeoutError:
                raise web.HTTPRequestTimeout(text="send the body faster\n") from None
        return await routed(http)

    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        assert isinstance(connection, Connection)
        connection.began()
        try:
            return await (around(http, route) if around else route(http))
        finally:
            connection.answered()

    server.request_handler = handle
    return lambda: Connection(server, book)


def warn(event: str, **fields: object) -> None:
    """Log a limit's event, within the bound on this module's records."""
    _log.warning("%s: %s", event, fields)

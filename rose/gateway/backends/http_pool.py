"""HTTP to replicas: kept connections, whose answers are pushed to a receiver as they arrive.

    idle -- post --> status -- body* --+-- complete --> idle again, or closed if its replica says so
      ^                                +-- the replica hangs up, or sends invalid HTTP --> closed
      +-- unused for long: closed

An HTTP client with streams to read from would make every token wait for another turn of the event
loop before it reaches its reader; with thousands of streams each such turn takes milliseconds.
"""

import asyncio
import ssl
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from rose.addresses import host_port
from rose.security.certificates import CertificateFiles
from rose.security.roles import Role, server_name

CONNECT_S = 2.0
KEEPALIVE_S = 300.0
OK = 200
_PORTS = {"http": 80, "https": 443}


class UpstreamError(ConnectionError):
    """A replica's connection broke, or the received bytes are not HTTP."""


class ResponseReceiver(Protocol):
    """Receiver of one answer. Its methods must not wait."""

    def status(self, code: int) -> None:
        """Take the head of the answer; called once, before any body."""
        ...

    def body(self, data: bytes) -> None:
        """Take more of the body."""
        ...

    def ended(self, error: Exception | None) -> None:
        """Take the end: complete, or with the `error` that broke it off; called once, at last."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a URL: the key of its kept connections, and its requests' first lines."""

    host: str
    port: int
    tls: bool
    head: bytes

    @property
    def key(self) -> tuple[str, int, bool]:
        """Equal for URLs that may share connections."""
        return self.host, self.port, self.tls


@lru_cache(maxsize=4_096)
def target_of(url: str) -> Target:
    """Return a replica URL's target. Raises UpstreamError for an invalid one."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
            "Content-Type: application/json\r\nAccept: */*\r\nContent-Length: "
        ).encode("ascii")
    except (KeyError, ValueError) as error:
        raise UpstreamError(f"{url} is no address of a replica: {error}") from error
    if not parts.hostname:
        raise UpstreamError(f"{url} is no address of a replica: it names no host")
    return Target(parts.hostname, port, parts.scheme == "https", head)


class _Nobody:
    """Receiver of the rest of an answer that is not needed."""

    def status(self, code: int) -> None:
        """Do nothing."""

    def body(self, data: bytes) -> None:
        """Do nothing."""

    def ended(self, error: Exception | None) -> None:
        """Do nothing."""


NOBODY = _Nobody()


class UpstreamConnection(asyncio.Protocol):
    """One connection, with one request at a time; between requests it is in `idle`."""

    def __init__(self, idle: list["UpstreamConnection"]) -> None:
        self._idle = idle
        self._receiver: ResponseReceiver | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._transport: asyncio.Transport | None = None
        self._given_up = False

    # ---- for whoever asks ----

    @property
    def is_open(self) -> bool:
        """True if a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def post(
        self, head: bytes, body: bytes, receiver: ResponseReceiver, more_head: bytes = b""
    ) -> None:
        """Send a request; the receiver gets its answer. more_head: whole lines."""
        self._set_timer(None)
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        assert self._transport is not None
        self._transport.write(b"%b%d\r\n%b\r\n%b" % (head, len(body), more_head, body))

    def leave(self, receiver: ResponseReceiver, rest_s: float = 0.0) -> None:
        """Cancel the receiver; the rest of its answer may take `rest_s`, or is dropped.

        Nothing happens if its answer was complete: the connection may be another's by now.
        """
        if self._receiver is not receiver:
            return
        if rest_s > 0:
            self._receiver = NOBODY
            self._set_timer(rest_s)
        else:
            self.close()

    def close(self) -> None:
        """Hang up."""
        self._set_timer(None)
        self._receiver = None
        # They reference each other.
        self._parser = None
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """Close a connection that is no longer waited for; it may or may not be open.

        A transport closed at that moment may never report it, and the two would keep each other.
        """
        self._given_up = True
        self.close()
        self._transport = None

    # ---- asyncio's protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._given_up:
            self.give_up()

    def data_received(self, data: bytes) -> None:
        if self._receiver is None or self._parser is None:
            # An unrequested answer: the server is not to be trusted any more.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(cast(Exception, error.__context__ or error))
        except httptools.HttpParserError as error:
            self._fail(UpstreamError(f"what the replica sends is no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(UpstreamError("the replica closed the connection before the answer's end"))

    # ---- the parser's callbacks ----

    def on_headers_complete(self) -> None:
        assert self._receiver is not None
        assert self._parser is not None
        self._receiver.status(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data)

    def on_message_complete(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._parser is not None and self._parser.should_keep_alive() and self.is_open:
            self._idle.append(self)
            self._set_timer(KEEPALIVE_S)
        else:
            self.close()
        receiver.ended(None)

    # ---- inside ----

    def _fail(self, error: Exception) -> None:
        receiver = self._receiver
        self.close()
        if self in self._idle:
            self._idle.remove(self)
        if receiver is not None:
            receiver.ended(error)

    def _set_timer(self, after_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if after_s is None else loop.call_later(after_s, self.close)


class ClusterTls:
    """TLS between a gateway and nodes' proxies: both show certificates of one cluster.

    A node's role is verified and not its dialled address, as everywhere in a cluster. Each
    connection uses the newest files.
    """

    def __init__(self, certificates: CertificateFiles) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._files = certificates
        self._shown = certificates.material()
        self._context = certificates.client_context()
        self._name = server_name(Role.NODE, certificates.identity.cluster)

    def __call__(self) -> tuple[ssl.SSLContext, str]:
        """Return the context of a new connection, and the name that its server has to prove."""
        self._shown = self._files.refresh(self._context, self._shown)
        return self._context, self._name


class Upstream:
    """Connections to all replicas; the router's caps bound them. End with `close`.

    tls: of `https` addresses, if they are nodes of a cluster; None uses the system's CAs.
    """

    def __init__(self, tls: ClusterTls | None = None) -> None:
        self._tls = tls or _of_the_system
        self._idle: dict[tuple[str, int, bool], list[UpstreamConnection]] = defaultdict(list)

    async def post(
        self, url: str, body: bytes, receiver: ResponseReceiver, more_head: bytes = b""
    ) -> UpstreamConnection:
        """Send a request with a JSON body; `leave` the connection in the end.

        more_head: further lines of its head, each with its end.
        Raises OSError if there is no connection within `CONNECT_S`, or the host is invalid.
        """
        target = target_of(url)
        idle = self._idle[target.key]
        while idle:
            connection = idle.pop()
            if connection.is_open:
                break
        else:
            connection = await self._connect(target, idle)
        connection.post(target.head, body, receiver, more_head)
        return connection

    def close(self) -> None:
        """Hang up every idle connection."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    async def _connect(self, target: Target, idle: list[UpstreamConnection]) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        tls, name = self._tls() if target.tls else (None, None)
        connection = UpstreamConnection(idle)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(
                    lambda: connection, target.host, target.port, ssl=tls, server_hostname=name
                )
        except ssl.SSLError as error:
            connection.give_up()
            # A failed verification is a ValueError too.
            raise UpstreamError(
                f"{host_port(target.host, target.port)} is not proved: {error}"
            ) from error
        except ValueError as error:
            connection.give_up()
            # A host that is not a name at all, to IDNA for example: found out in the lookup.
            raise UpstreamError(f"{target.host!r} is no host of a replica: {error}") from error
        except BaseException:
            connection.give_up()
            raise
        return connection


def _of_the_system() -> tuple[ssl.SSLContext, None]:
    return _default_tls(), None


@lru_cache(maxsize=1)
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()

"""HTTP to replicas, and the TLS of a cluster's nodes: connections that are kept (`http_client`)."""

import ssl
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from rose.addresses import host_port
from rose.process.http_client import HttpConnection, HttpPool
from rose.security.certificates import CertificateFiles
from rose.security.roles import Role, server_name

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


class UpstreamConnection(HttpConnection[ResponseReceiver]):
    """One connection to a replica."""

    def leave(self, receiver: ResponseReceiver, rest_s: float = 0.0) -> None:
        """Cancel the receiver; the rest of its answer may take `rest_s`, or is dropped.

        Nothing happens if its answer was complete: the connection may be another's by now.
        """
        if self._receiver is not receiver:
            return
        if rest_s > 0:
            self._receiver = NOBODY
            self.close_after(rest_s)
        else:
            self.close()

    def ended(self, receiver: ResponseReceiver, error: Exception | None) -> None:
        if isinstance(error, httptools.HttpParserError):
            error = UpstreamError(f"what the replica sends is no HTTP: {error}")
        elif type(error) is ConnectionError:
            error = UpstreamError(str(error))
        receiver.ended(error)

    # ---- the parser's callbacks ----

    def on_headers_complete(self) -> None:
        if self._receiver is not None and self._parser is not None:
            self._receiver.status(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data)


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
        self._tls = tls or _system_tls
        self._pool: HttpPool[tuple[str, int, bool], UpstreamConnection] = HttpPool(
            UpstreamConnection
        )

    async def post(
        self, url: str, body: bytes, receiver: ResponseReceiver, more_head: bytes = b""
    ) -> UpstreamConnection:
        """Send a request with a JSON body; `leave` the connection in the end.

        more_head: further lines of its head, each with its end.
        Raises OSError if there is no connection soon, or the host is invalid.
        """
        target = target_of(url)
        connection = self._pool.take(target.key) or await self._connect(target)
        request = b"%b%d\r\n%b\r\n%b" % (target.head, len(body), more_head, body)
        connection.begin(receiver, request)
        return connection

    def close(self) -> None:
        """Hang up every idle connection."""
        self._pool.close()

    async def _connect(self, target: Target) -> UpstreamConnection:
        host, port = target.host, target.port
        tls, name = self._tls() if target.tls else (None, None)
        try:
            return await self._pool.connect(target.key, host, port, tls, name)
        except ssl.SSLError as error:
            # A failed verification is a ValueError too.
            raise UpstreamError(f"{host_port(host, port)} is not proved: {error}") from error
        except ValueError as error:
            # A host that is not a name at all, to IDNA for example: found out in the lookup.
            raise UpstreamError(f"{host!r} is no host of a replica: {error}") from error


def _system_tls() -> tuple[ssl.SSLContext, None]:
    return _default_tls(), None


@lru_cache(maxsize=1)
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()

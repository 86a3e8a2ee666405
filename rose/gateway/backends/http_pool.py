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
    """Error raised when a replica's connection broke, its address is invalid, or it does not speak
    HTTP.
    """


class ResponseReceiver(Protocol):
    """Interface of the receiver of one HTTP response; its methods must not block."""

    def status(self, code: int) -> None:
        """Process the status code of the response; called once, before any body."""
        ...

    def body(self, data: bytes) -> None:
        """Process the next bytes of the response's body."""
        ...

    def ended(self, error: Exception | None) -> None:
        """Process the response's end, complete or broken off by `error`; called once, at last."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """Address that a URL names: the key of its kept connections, and the first lines of its
    requests.
    """

    host: str
    port: int
    tls: bool
    head: bytes

    @property
    def key(self) -> tuple[str, int, bool]:
        """Host, port and TLS; equal for URLs that may share connections."""
        return self.host, self.port, self.tls


@lru_cache(maxsize=4_096)
def target_of(url: str) -> Target:
    """Return the address that a replica's URL names; results are cached. Raises UpstreamError for
    an invalid one.
    """
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
    """Receiver that ignores the rest of a response that is not needed."""

    def status(self, code: int) -> None:
        """Do nothing."""

    def body(self, data: bytes) -> None:
        """Do nothing."""

    def ended(self, error: Exception | None) -> None:
        """Do nothing."""


NOBODY = _Nobody()


class UpstreamConnection(HttpConnection[ResponseReceiver]):
    """One HTTP connection to a replica."""

    def leave(self, receiver: ResponseReceiver, rest_s: float = 0.0) -> None:
        """Stop delivering to the receiver: close the connection, or read the rest of the response
        for up to `rest_s` seconds and keep it.

        Nothing happens if its response was complete: the connection may be another receiver's by
        now.
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
    """TLS settings of connections from a gateway to nodes' proxies: both sides show certificates of
    one cluster.

    The server's role is verified, not its address, as everywhere in a cluster. Each connection uses
    the newest certificate files.
    """

    def __init__(self, certificates: CertificateFiles) -> None:
        """Raise ConfigError for certificate files that cannot be used."""
        self._files = certificates
        self._shown = certificates.material()
        self._context = certificates.client_context()
        self._name = server_name(Role.NODE, certificates.identity.cluster)

    def __call__(self) -> tuple[ssl.SSLContext, str]:
        """Return the TLS context of a new connection, and the name that the server's certificate
        must have; changed files are read again.
        """
        self._shown = self._files.refresh(self._context, self._shown)
        return self._context, self._name


class Upstream:
    """Pool of HTTP connections to all replicas, without a limit of its own. End with `close`.

    tls: TLS settings of `https` addresses that are nodes of a cluster; None uses the system's CAs.
    """

    def __init__(self, tls: ClusterTls | None = None) -> None:
        self._tls = tls or _system_tls
        self._pool: HttpPool[tuple[str, int, bool], UpstreamConnection] = HttpPool(
            UpstreamConnection
        )

    async def post(
        self, url: str, body: bytes, receiver: ResponseReceiver, more_head: bytes = b""
    ) -> UpstreamConnection:
        """Send a POST request with a JSON body and return its connection; call the connection's
        `leave` in the end.

        receiver: gets the response. more_head: further header lines, each with its line end. Raises
        OSError if no connection can be made soon, or the URL is invalid.
        """
        target = target_of(url)
        connection = self._pool.take(target.key) or await self._connect(target)
        request = b"%b%d\r\n%b\r\n%b" % (target.head, len(body), more_head, body)
        connection.begin(receiver, request)
        return connection

    def close(self) -> None:
        """Close every idle connection."""
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
            # A host that is not a valid name, to IDNA for example, fails in the lookup.
            raise UpstreamError(f"{host!r} is no host of a replica: {error}") from error


def _system_tls() -> tuple[ssl.SSLContext, None]:
    return _default_tls(), None


@lru_cache(maxsize=1)
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()

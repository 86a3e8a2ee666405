"""Credentials of servers and clients of weights: the cluster's token, certificates of both sides.

Addresses are announced by others, so the token goes only to servers that its owner trusts:
with certificates   to whoever proves by one that it belongs to the cluster, and only over TLS
without             to origins that this machine's own configuration names
"""

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import aiohttp
from yarl import URL

from rose.addresses import checked_bucket, checked_url, host_port, is_loopback
from rose.errors import ConfigError
from rose.security.certificates import CertificateFiles, files_of
from rose.security.keys import check_no_key
from weight_transfer.bucket import Bucket
from weight_transfer.errors import BucketError
from weight_transfer.fetch.session import SourceSession

MOST_CONNECTIONS = 256


class OriginRefused(aiohttp.ClientError):
    """Error for an address that this machine may not connect to; callers try their next source."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Token and certificates that servers and clients of weights show to each other.

    token: sent by callers, empty for none. ca, certificate, key: PEM files, all three or none; with
    them each side shows its certificate, and each must be signed by one of `ca`. origins: URLs
    (scheme, host, port) that get the token where no certificates are used. insecure: True allows a
    server that other machines reach without certificates.
    """

    token: str = ""
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    origins: frozenset[str] = frozenset()
    insecure: bool = False

    def __post_init__(self) -> None:
        given = [path is not None for path in (self.ca, self.certificate, self.key)]
        if any(given) and not all(given):
            raise ConfigError("TLS needs `ca`, `certificate` and `key`; give all three or none")
        for origin in self.origins:
            checked_url(origin, "an origin that gets the token")
            if URL(origin).path != "/":
                raise ConfigError(f"{origin!r:.80} is no origin; give scheme, host and port")

    @classmethod
    def read(
        cls,
        token_file: Path | None,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        origins: Iterable[str] = (),
    ) -> Self:
        """Return credentials with the token in a file.

        Raises ConfigError for an unreadable or empty file.
        """
        known = frozenset(origins)
        if token_file is None:
            return cls("", ca, certificate, key, known)
        try:
            token = token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token file {token_file} cannot be read: {error}") from error
        check_no_key(token_file, token.encode())
        if not token:
            raise ConfigError(f"token file {token_file} is empty; write the cluster's token there")
        return cls(token, ca, certificate, key, known)

    def naming(self, urls: Iterable[str]) -> Self:
        """Return a copy that also sends the token to the origins of these URLs.

        Raises ConfigError for a malformed URL.
        """
        checked = (URL(checked_url(url, "an address that gets the token")) for url in urls)
        return replace(self, origins=self.origins | {str(url.origin()) for url in checked})

    def proving(self, certificates: CertificateFiles) -> Self:
        """Return a copy that shows a process's own certificate, with the paths of its files."""
        ca, certificate, key = certificates.paths
        return replace(self, ca=ca, certificate=certificate, key=key)

    def check_exposure(self, host: str) -> None:
        """Raise ConfigError if a server at `host` is reachable from other machines without
        certificates.

        Loopback addresses and `insecure` are allowed. A token alone is not enough: over plain HTTP
        any listener on the network learns it.
        """
        if not (self.insecure or self.ca or is_loopback(host)):
            raise ConfigError(
                f"{host or 'all addresses'} (weights) is reached from other machines, and whoever"
                " listens there reads weights and token; give ca, certificate and key, or fence the"
                " network and say insecure"
            )

    @property
    def scheme(self) -> str:
        return "https" if self.ca else "http"

    def server(self) -> ssl.SSLContext | None:
        """Return a TLS context that demands callers' certificates, None without TLS.

        Raises ConfigError.
        """
        files = self.files()
        return files.server_context() if files else None

    def session(self) -> aiohttp.ClientSession:
        """Return a new HTTP client session that sends the token and shows the certificate.

        Certificate files are read again when they change. Raises ConfigError.
        """
        files = self.files()
        context = files.client_context() if files else None
        shown = files.material() if files else None

        async def prove(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            nonlocal shown
            if files and context and shown:
                shown = files.refresh(context, shown)
            return await self._shown(request, handler)

        # A request that waits in line keeps its connection, and all neighbours may be asked.
        connector = aiohttp.TCPConnector(
            limit=MOST_CONNECTIONS, ssl=True if context is None else context
        )
        return aiohttp.ClientSession(connector=connector, middlewares=(prove,))

    def sources(self, buckets: Iterable[str] = ()) -> SourceSession:
        """Return a new session like that of `session`, which reads from these buckets too.

        Raises ConfigError for a bucket that cannot be opened.
        """
        named = [checked_bucket(url, "a bucket of versions") for url in buckets]
        try:
            opened = [Bucket(url) for url in named]
        except BucketError as error:
            raise ConfigError(str(error)) from error
        return SourceSession(self.session(), opened)

    def bears(self, url: URL) -> bool:
        """Return True if a request to `url` carries the token.

        With certificates each https URL gets it; without them, only the URLs in `origins`. Raises
        OriginRefused for a plain http URL when certificates are given.
        """
        if self.ca is not None:
            if url.scheme != "https":
                at = f"{url.scheme}://{host_port(url.host or '', url.port)}"
                raise OriginRefused(
                    f"{at} is not asked: with certificates only https is spoken; announce it so"
                )
            return bool(self.token)
        return bool(self.token) and _place(url) in {_place(URL(each)) for each in self.origins}

    async def _shown(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send a request, or one that a redirect causes, with the token if its URL may have it.

        Return its response. With certificates the server has proved its identity before any header
        is sent.
        """
        if self.bears(request.url):
            request.headers["Authorization"] = f"Bearer {self.token}"
        return await handler(request)

    def files(self) -> CertificateFiles | None:
        """Return the certificate files as one object, None without TLS. Raises ConfigError."""
        return files_of(self.ca, self.certificate, self.key)


def _place(url: URL) -> tuple[str, str | None, int | None]:
    return url.scheme, url.host, url.port


OPEN = Credentials()
"""Credentials without token and TLS, for loopback and trusted networks."""

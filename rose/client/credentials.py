"""Credentials of a trainer towards gateways: a token in a file, a CA, a certificate of its own.

All are paths, so that clients travel between processes; files are read again when they change.
"""

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from rose.addresses import is_loopback
from rose.errors import ConfigError
from rose.security.certificates import CertificateFiles, authorities_in
from rose.security.tokens import TokenFile


@dataclass(frozen=True, slots=True)
class GatewayCredentials:
    """Paths of a trainer's credentials towards gateways; all of them may be left out.

    token_file: file that `rose token issue --out` wrote. ca: PEM file of the authority that signed
    the gateways' certificates. certificate, key: PEM files of the trainer's own, with or instead of
    a token; both or none, and only with `ca`. Raises ConfigError otherwise.
    """

    token_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            lacking = "key" if self.key is None else "certificate"
            raise ConfigError(
                f"the `{lacking}` is missing; give `certificate` and `key`, or neither"
            )
        if self.certificate is not None and self.ca is None:
            raise ConfigError("`certificate` needs the gateways' `ca`; give it")

    def check(self, url: str) -> None:
        """Raise ConfigError if `url` would send the token unencrypted to another machine."""
        place = urlsplit(url)
        if self.token_file and place.scheme == "http" and not is_loopback(place.hostname or ""):
            raise ConfigError(
                f"{url!r:.80} would get the token in the clear; give https://, and the gateways' ca"
            )

    def session(
        self, urls: Iterable[str], limit: int, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientSession:
        """Return an aiohttp session that shows these credentials to the gateways at `urls`.

        limit: most connections at once, 0 for no limit. Raises ConfigError for files that cannot be
        used.
        """
        shown = Shown(self, frozenset(URL(url).origin() for url in urls))
        connector = aiohttp.TCPConnector(
            limit=limit, keepalive_timeout=120.0, ssl=shown.context or True
        )
        return aiohttp.ClientSession(
            connector=connector, timeout=timeout, middlewares=(shown.prove,)
        )


class Shown:
    """Credentials of one HTTP session, read again whenever a file changes."""

    def __init__(self, credentials: GatewayCredentials, origins: frozenset[URL]) -> None:
        """Read the files. Raises ConfigError for files that cannot be used.

        origins: scheme, host and port of the servers that may receive the token.
        """
        self._origins = origins
        own = credentials
        self._token = TokenFile(own.token_file) if own.token_file else None
        self._files: CertificateFiles | None = None
        self.context: ssl.SSLContext | None = None
        if own.ca and own.certificate and own.key:
            self._files = CertificateFiles(own.ca, own.certificate, own.key)
            self._material = self._files.material()
            self.context = self._files.client_context()
        elif own.ca:
            authorities_in(own.ca)
            try:
                self.context = ssl.create_default_context(cafile=str(own.ca))
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{own.ca} cannot be used for TLS: {error}") from error

    async def prove(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Add the newest token to a request, reload a changed certificate, and return the response.

        aiohttp calls this middleware for each request. Only the gateways receive the token, not a
        server that a redirect leads to.
        """
        if self._files and self.context:
            self._material = self._files.refresh(self.context, self._material)
        # Not after a redirect to another server.
        if self._token and request.url.origin() in self._origins:
            request.headers["Authorization"] = f"Bearer {self._token.token()}"
        return await handler(request)


NOTHING_SHOWN = GatewayCredentials()

"""Who may fetch weights, and from whom: a token of the cluster, certificates of both sides."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp

from rose.errors import ConfigError

MOST_CONNECTIONS = 256


@dataclass(frozen=True, slots=True)
class Credentials:
    """token: what callers bear, nothing when empty. The paths: all three of PEM files, or none.

    With certificates both sides show theirs, and each must be signed by one of `ca`.
    """

    token: str = ""
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        given = [path is not None for path in (self.ca, self.certificate, self.key)]
        if any(given) and not all(given):
            raise ConfigError("TLS needs `ca`, `certificate` and `key`; give all three or none")

    @classmethod
    def read(
        cls,
        token_file: Path | None,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> Self:
        """With the token of a file; ConfigError when the file cannot be read or is empty."""
        if token_file is None:
            return cls("", ca, certificate, key)
        try:
            token = token_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token file {token_file} cannot be read: {error}") from error
        if not token:
            raise ConfigError(f"token file {token_file} is empty; write the cluster's token there")
        return cls(token, ca, certificate, key)

    @property
    def scheme(self) -> str:
        """Of a server's address."""
        return "https" if self.ca else "http"

    def server(self) -> ssl.SSLContext | None:
        """For a server, which asks for the caller's certificate; None without TLS. ConfigError."""
        context = self._context(ssl.Purpose.CLIENT_AUTH)
        if context:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext | None:
        """For a caller, which checks the server's name and certificate. ConfigError."""
        return self._context(ssl.Purpose.SERVER_AUTH)

    def session(self) -> aiohttp.ClientSession:
        """Connections that show what they have to. ConfigError."""
        context = self.client()
        # A wait in line holds its connection, and all neighbours may be waited for at once.
        connector = aiohttp.TCPConnector(
            limit=MOST_CONNECTIONS, ssl=True if context is None else context
        )
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return aiohttp.ClientSession(connector=connector, headers=headers)

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext | None:
        if self.ca is None:
            return None
        assert self.certificate
        assert self.key
        for path in (self.ca, self.certificate, self.key):
            if not path.is_file():
                raise ConfigError(f"TLS file {path} is missing")
        try:
            context = ssl.create_default_context(purpose, cafile=str(self.ca))
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{self.ca}, {self.certificate} and {self.key} cannot be used for TLS: {error}"
            ) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


OPEN = Credentials()
"""For loopback and trusted networks: no token, no TLS."""

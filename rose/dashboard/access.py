"""Access to the dashboard: who may read it, and what every answer tells browsers.

    on loopback                     ──► whoever reaches the port, by a name of this machine
    elsewhere, with certificates    ──► an operator's certificate
    with a token file, anywhere     ──► the token, as a password of any user or as a bearer
    elsewhere, with `--insecure`    ──► whoever reaches the port, as the operator said

It tells more than `/metrics` (names, reasons, who decided what), so certificates are asked for.
"""

import base64
import binascii
import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from rose.addresses import is_loopback
from rose.errors import ConfigError
from rose.security.certificates import CertificateFiles, peer_over
from rose.security.keys import check_no_key
from rose.security.roles import Role

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LEAST_TOKEN_CHARS: Final = 16
MAX_TOKEN_BYTES: Final = 4_096
REALM: Final = 'Basic realm="ROSE dashboard", charset="UTF-8"'


class DashboardToken:
    """A secret in a file, which is read again at each call: it may be replaced."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file without a usable token."""
        self._path = path
        self._read()

    def has(self, shown: str) -> bool:
        """Return True if `shown` is the token; False while the file is missing or empty."""
        try:
            return hmac.compare_digest(self._read(), shown.encode("utf-8", "replace"))
        except ConfigError:
            return False

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                token = file.read(MAX_TOKEN_BYTES).strip()
        except OSError as error:
            raise ConfigError(
                f"--dashboard-token-file {self._path} cannot be read ({error.strerror})"
            ) from error
        check_no_key(self._path, token)
        if len(token) < LEAST_TOKEN_CHARS:
            raise ConfigError(
                f"--dashboard-token-file {self._path} holds {len(token)} characters; put at least"
                f" {LEAST_TOKEN_CHARS} there: openssl rand -hex 32"
            )
        return token


class Access:
    """Says who may read. tls: whether the port speaks TLS."""

    def __init__(
        self,
        host: str,
        certificates: CertificateFiles | None,
        token: DashboardToken | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._local = is_loopback(host)
        self.tls = certificates is not None and not self._local
        self._cluster = certificates.identity.cluster if certificates else ""
        self._token = token
        self._clock = clock

    def check(self, request: web.Request) -> None:
        """Raise the HTTP answer of who may not."""
        # A page of elsewhere may have its name lead to this machine's loopback.
        if self._local and not is_loopback(_host_of(request)):
            raise web.HTTPMisdirectedRequest(
                text="ask for localhost, 127.0.0.1 or [::1]; other names may be anybody's\n"
            )
        if not (self._token or self.tls):
            return
        if self._bears_token(request) or self._is_operator(request):
            return
        wanted = [
            *(["an operator's certificate"] if self.tls else []),
            *(["the token, as the password of any user"] if self._token else []),
        ]
        raise web.HTTPUnauthorized(
            text=f"show {' or '.join(wanted)}\n",
            headers={"WWW-Authenticate": REALM} if self._token else {},
        )

    def _bears_token(self, request: web.Request) -> bool:
        if self._token is None:
            return False
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._token.has(given.strip())
        if scheme.lower() != "basic":
            return False
        try:
            text = base64.b64decode(given.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return False
        return self._token.has(text.partition(":")[2])

    def _is_operator(self, request: web.Request) -> bool:
        if not self.tls:
            return False
        try:
            peer = peer_over(request.transport)
        except ConfigError:
            return False
        return (
            peer is not None
            and peer.identity.role is Role.OPERATOR
            and peer.identity.cluster == self._cluster
            and peer.not_after_s > self._clock()
        )


def _host_of(request: web.Request) -> str:
    host = request.headers.get("Host", "")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]

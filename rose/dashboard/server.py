"""HTTP server of the dashboard: pages, `/series`, `/events`, `/static`; nothing that changes.

Who may read:

    on loopback                     ──► whoever reaches the port, by a name of this machine
    elsewhere, with certificates    ──► an operator's or viewer's certificate
    with a token file, anywhere     ──► the token, as a password of any user or as a bearer
    elsewhere, with `--insecure`    ──► whoever reaches the port, as the operator said

It tells more than `/metrics` (names, reasons, who decided what), so certificates are asked for.
"""

import argparse
import asyncio
import base64
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from rose.addresses import PATIENCE_S, DefaultPort, check_exposure, is_loopback
from rose.dashboard.page import assets
from rose.dashboard.pages import PATHS
from rose.dashboard.watch import BusyError, Watch
from rose.errors import ConfigError
from rose.process.http_port import HttpPort
from rose.security.certificates import CertificateFiles, peer_over
from rose.security.roles import DASHBOARD_READERS
from rose.security.tokens import SecretFile

# A viewer that takes nothing for so long is gone.
WRITE_S: Final = 10.0
MAX_AT_CHARS: Final = 2_048
STOP_S: Final = 1.0

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
REALM: Final = 'Basic realm="ROSE dashboard", charset="UTF-8"'


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """Port and host of the dashboard. token_file: file of the secret that readers must show.

    prometheus: address of the one that scrapes the fleet, "" for none.
    """

    port: int
    host: str = "127.0.0.1"
    token_file: Path | None = None
    prometheus: str = ""

    def check(self, certificates: CertificateFiles | None, *, insecure: bool) -> None:
        """Raise ConfigError for an invalid port, or one open to the network without `insecure`."""
        if not 0 < self.port < 1 << 16:
            raise ConfigError(f"dashboard port {self.port} does not exist; give 1 to 65535")
        if certificates is None:
            what = "read what runs where, and who decided it"
            check_exposure(self.host, insecure, what)


def add_dashboard_options(parser: argparse.ArgumentParser) -> None:
    """Add the dashboard's options to a parser; `taken_dashboard` reads them."""
    what = "pages for a browser; they change nothing"
    add = parser.add_argument_group("dashboard", what).add_argument
    what = f"serve them there (default: nowhere; {DefaultPort.DASHBOARD} is as good as any)"
    add("--dashboard-port", type=int, metavar="N", help=what)
    what = "address of the pages (default: loopback; others over TLS to operators, or with"
    add("--dashboard-host", default="127.0.0.1", metavar="HOST", help=f"{what} --insecure)")
    what = "readers show the secret in this file, as the password of any user"
    add("--dashboard-token-file", type=Path, metavar="FILE", help=what)
    what = (
        "that scrapes the fleet: pages show more than ten minutes, and what lending would"
        " bring by the engines' own metrics"
    )
    add("--prometheus", default="", metavar="URL", help=what)


def taken_dashboard(args: argparse.Namespace) -> DashboardSettings | None:
    """Return the dashboard's settings, None without a port. Raises ConfigError."""
    if args.dashboard_port is None:
        for name in ("dashboard_token_file", "prometheus"):
            if getattr(args, name):
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} is of a dashboard; give --dashboard-port")
        return None
    return DashboardSettings(
        args.dashboard_port, args.dashboard_host, args.dashboard_token_file, args.prometheus
    )


class Access:
    """Check of who may read the dashboard. tls: True if its port speaks TLS."""

    def __init__(
        self,
        host: str,
        certificates: CertificateFiles | None,
        token: SecretFile | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._local = is_loopback(host)
        self.tls = certificates is not None and not self._local
        self._cluster = certificates.identity.cluster if certificates else ""
        self._token = token
        self._clock = clock

    def check(self, request: web.Request) -> None:
        """Raise an HTTP error, 401 or 421, if the requester may not read the dashboard."""
        # A page of elsewhere may have its name lead to this machine's loopback.
        if self._local and not is_loopback(_host_of(request)):
            raise web.HTTPMisdirectedRequest(
                text="ask for localhost, 127.0.0.1 or [::1]; other names may be anybody's\n"
            )
        if not (self._token or self.tls):
            return
        if self._bears_token(request) or self._is_reader(request):
            return
        wanted = [
            *(["an operator's or viewer's certificate"] if self.tls else []),
            *(["the token, as the password of any user"] if self._token else []),
        ]
        raise web.HTTPUnauthorized(
            text=f"show {' or '.join(wanted)}\n",
            headers={"WWW-Authenticate": REALM} if self._token else {},
        )

    def _bears_token(self, request: web.Request) -> bool:
        if self._token is None:
            return False
        shown = request.headers.get("Authorization", "")
        scheme, _, given = shown.partition(" ")
        if scheme.lower() != "basic":
            return self._token.is_borne(shown)
        try:
            text = base64.b64decode(given.strip(), validate=True).decode()
        except ValueError:
            return False
        return self._token.has(text.partition(":")[2])

    def _is_reader(self, request: web.Request) -> bool:
        if not self.tls:
            return False
        try:
            peer = peer_over(request.transport)
        except ConfigError:
            return False
        return (
            peer is not None
            and peer.identity.role in DASHBOARD_READERS
            and peer.identity.cluster == self._cluster
            and peer.not_after_s > self._clock()
        )


def _host_of(request: web.Request) -> str:
    host = request.headers.get("Host", "")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class DashboardServer:
    """HTTP server of the pages of a `Watch`. Start it once, and close it."""

    def __init__(
        self,
        watch: Watch,
        settings: DashboardSettings,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """Prepare the server. Raises ConfigError for a token file without a usable token."""
        self._watch = watch
        self._settings = settings
        self._certificates = certificates
        file = settings.token_file
        token = SecretFile(file, "--dashboard-token-file") if file else None
        self._access = Access(settings.host, certificates, token)
        self._listening: HttpPort | None = None
        self._streams: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind the port and serve until `close`. Raises ConfigError if the port is taken."""
        app = web.Application(middlewares=[self._guarded])
        routes = dict.fromkeys(PATHS, self._page)
        routes |= {"/series": self._series, "/static/{name}": self._static}
        for path, handler in {**routes, "/events": self._events}.items():
            app.router.add_get(path, handler, allow_head=False)
        app.on_shutdown.append(self._end_streams)
        files = self._certificates
        tls = files.server_context(everybody=True) if files and self._access.tls else None
        host, number = self._settings.host, self._settings.port
        port = HttpPort(app, host, number, tls, patience_s=PATIENCE_S, shutdown_s=STOP_S)
        do = "give another --dashboard-port"
        await port.start(f"dashboard port {number} cannot be served: {{}}; {do}")
        self._listening = port

    async def close(self) -> None:
        """Stop the server and end all streams."""
        if self._listening is not None:
            await self._listening.close()
            self._listening = None

    # ---- answers ----

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return the handler's reply with security headers, or an error without access."""
        try:
            self._access.check(request)
            response = await handler(request)
        except web.HTTPException as answer:
            answer.headers.update(HEADERS)
            raise
        except BusyError as busy:
            headers = {**HEADERS, "Retry-After": "2"}
            return web.Response(status=503, text=f"{busy}\n", headers=headers)
        return response

    async def _page(self, request: web.Request) -> web.Response:
        text = await self._watch.page(request.path, request.query)
        if text is None:
            raise web.HTTPNotFound(text="there is no such page\n")
        response = web.Response(text=text, content_type="text/html", headers=HEADERS)
        response.enable_compression()
        return response

    async def _series(self, request: web.Request) -> web.Response:
        said = await self._watch.series(request.query)
        if said is None:
            raise web.HTTPNotFound(text="there is no such node\n")
        response = web.json_response(said, headers=HEADERS)
        response.enable_compression()
        return response

    async def _static(self, request: web.Request) -> web.Response:
        found = assets().get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text="there is no such file\n")
        # Its address has its digest.
        headers = {**HEADERS, "Cache-Control": "private, max-age=604800, immutable"}
        response = web.Response(body=found[0], content_type=found[1], headers=headers)
        response.enable_compression()
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        path, query = _asked(request.query.get("at", "/"))
        if path not in PATHS:
            raise web.HTTPNotFound(text="there is no such page\n")
        messages = self._watch.messages(path, query)
        # A viewer too many is refused before anything is sent.
        async with contextlib.aclosing(messages):
            first = await anext(messages, None)
            response = web.StreamResponse(headers=HEADERS)
            response.content_type = "text/event-stream"
            await response.prepare(request)
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                    if first is not None:
                        await _written(response, b"retry: 2000\n" + first)
                    async for message in messages:
                        await _written(response, message)
            except TimeoutError:
                # A reader that accepts no bytes cannot be sent the end of its stream, either.
                if request.transport is not None:
                    request.transport.abort()
            finally:
                self._streams.discard(task)
        return response

    async def _end_streams(self, app: web.Application) -> None:
        del app
        for task in self._streams:
            task.cancel()


async def _written(response: web.StreamResponse, message: bytes) -> None:
    async with asyncio.timeout(WRITE_S):
        await response.write(message)


def _asked(at: str) -> tuple[str, Mapping[str, str]]:
    """Return path and query of the address that a page gives as its own, "" for an invalid one."""
    try:
        parts = urlsplit(at[:MAX_AT_CHARS])
        query = parse_qsl(parts.query, max_num_fields=16, errors="replace")
    except ValueError:
        return "", {}
    return parts.path, dict(query)

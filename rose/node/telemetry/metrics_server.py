"""HTTP server of a node's `/metrics`, on threads of its own: a stuck daemon still answers."""

import socket
import ssl
import threading
from socketserver import ThreadingMixIn
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

# A caller that says nothing holds a thread for no longer.
PATIENCE_S: Final = 10.0


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore calls that the caller broke off."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE_S

    def log_message(self, *_: object) -> None:
        """Scrapes are no news."""


class ThreadedMetricsServer:
    """Answers with all of a registry, to everybody who reaches the address."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raises OSError when the port is taken. `tls`: speak it."""
        app = make_wsgi_app(registry)
        self._server = make_server(host, port, app, _server_class(host), handler_class=_Handler)
        if tls is not None:
            # The handshake is the handler's: one that hangs must not keep others from connecting.
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(
            target=self._server.serve_forever, name="rose-metrics", daemon=True
        ).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


def _server_class(host: str) -> type[_Server]:
    return _Server6 if ":" in host else _Server

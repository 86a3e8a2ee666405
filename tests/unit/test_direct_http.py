"""ROSE's own services are asked directly, whatever proxy the environment names."""

import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from rose.direct_http import open_directly

ROSE = Path(__file__).parents[2] / "rose"


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        with open_directly(f"http://127.0.0.1:{server.server_port}/", 5.0) as reply:
            assert reply.status == 200


def test_nothing_else_calls_urlopen() -> None:
    """Another call of it would ask a proxy."""
    callers = [path for path in ROSE.rglob("*.py") if "urlopen(" in path.read_text()]
    assert callers == []

"""Addresses from outside: those that pass can be connected to, all others are refused in a line."""

import asyncio
import contextlib
import re
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

import rose.addresses
from rose.addresses import checked_url, host_port, is_address, is_loopback
from rose.direct_http import open_directly
from rose.errors import ConfigError
from rose.gateway.settings import parse_settings
from rose.main.scheduler import main, settings_of

GOOD = [
    "http://127.0.0.1:8000",
    "https://trainer.cluster.local:8443/weights",
    "http://localhost",
    "http://rose_scheduler-0:1",
    "http://[::1]:65535/",
    "http://[2001:db8::1]/a/b%20c",
    "http://xn--mnchen-3ya.de",
    "http://" + "a" * 63 + ".example:80",
]
BAD = [
    "",
    "x",
    "http:",
    "http://",
    "http:///",
    "//127.0.0.1",
    "ftp://x",
    "unix:///tmp/x",
    "file:///etc/passwd",
    "http://" + "a" * 64 + "/",
    "http://" + "a" * 64 + ".example",
    "http://" + "a." * 200 + "b",
    "http://a..b",
    "http://.",
    "http://a.",
    "http://.a",
    "http://-",
    "http://-a",
    "http://a-.b",
    "http://xn--a/",
    "http://xn--\u00fc/",
    "http://[::1",
    "http://::1",
    "http://[1.2.3.4]",
    "http://[::1%25eth0]",
    "http://[v1.x]",
    "http://1.2.3",
    "http://127.1",
    "http://0x7f000001",
    "http://999.1.1.1",
    "http://1.2.3.04",
    "http://host:",
    "http://host:0",
    "http://host:99999",
    "http://host:-1",
    "http://host:+80",
    "http://host:\u0664",
    "http://user@host",
    "http://user:secret@host",
    "http://host?query",
    "http://host/#fragment",
    "http://host/%zz",
    "http://%zz",
    "http://host/a b",
    "http://host/\r\nX: y",
    "http://host\n",
    "\thttp://host",
    "http://ho st",
    "http://127.0.0.1:1/\x00",
    "http://m\u00fcnchen.de",
    "http://\u2488.com",
    "http://a\u3002\u3002b",
    "http://\ufffd",
    "http://\ud7ff",
    "http://127.0.0.1:9/" + "x" * 9_000,
]


@pytest.mark.parametrize("url", GOOD)
def test_an_address_that_can_be_one_is_returned_as_it_is(url: str) -> None:
    assert checked_url(url, "the url") == url


@pytest.mark.parametrize("url", BAD)
def test_what_is_no_address_is_refused_in_one_short_line(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_url(url, "the url of version 3")
    said = str(caught.value)
    assert said.startswith("the url of version 3 is ")
    assert said.isprintable()
    assert len(said) < 300


def test_a_caller_may_want_one_scheme_only() -> None:
    assert checked_url("http://a", "it", ("http",)) == "http://a"
    with pytest.raises(ConfigError, match=r"give http://HOST"):
        checked_url("https://a", "it", ("http",))


HOSTS = st.one_of(st.text(max_size=80), st.from_regex(r"[a-z0-9.\[\]:%-]{1,80}", fullmatch=True))


@given(HOSTS, st.text(max_size=20))
def test_any_text_is_an_address_to_all_clients_or_refused(host: str, rest: str) -> None:
    with contextlib.suppress(ConfigError):
        url = checked_url(f"http://{host}{rest}", "the url")
        parsed = URL(url)
        assert parsed.host
        assert parsed.port
        parsed.host.encode("idna")


def test_connecting_to_an_accepted_address_fails_only_as_connections_do() -> None:
    class Nowhere(aiohttp.abc.AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list:
            raise OSError(f"{host} is nowhere")

        async def close(self) -> None: ...

    async def connect(url: str) -> None:
        connector = aiohttp.TCPConnector(resolver=Nowhere())
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(url)

    names = [url for url in GOOD if "://[" not in url and "127." not in url]
    for url in names:
        asyncio.run(connect(url))


HOSTS = {
    "127.0.0.1": "127.0.0.1:80",
    "::1": "[::1]:80",
    "[::1]": "[::1]:80",
    "n.local": "n.local:80",
}


@pytest.mark.parametrize("host", HOSTS)
def test_an_address_with_a_port_has_brackets_where_it_is_of_ipv6(host: str) -> None:
    assert host_port(host, 80) == HOSTS[host]
    assert is_address(host_port(host, 80))
    assert checked_url(f"http://{host_port(host)}/x", "it")


def test_every_address_with_a_port_is_written_by_one_function() -> None:
    by_hand = re.compile(r"\{[\w.]*(?:host|address)\}:\{[\w.]*port\}")
    folder = Path(rose.addresses.__file__).parent
    found = [each.name for each in folder.rglob("*.py") if by_hand.search(each.read_text())]
    assert found == ["addresses.py"]


# ---- exposure ----


HERE = ["127.0.0.1", "127.8.9.1", "::1", "localhost"]
OPEN = ["0.0.0.0", "::", "10.0.0.1", "", "scheduler", "localhost.example", "127.0.0.1.example"]


@pytest.mark.parametrize("host", HERE + OPEN)
def test_only_loopback_is_reached_from_this_machine_alone(host: str) -> None:
    assert is_loopback(host) is (host in HERE)


@pytest.mark.parametrize("host", OPEN)
def test_an_address_of_the_network_is_refused_in_a_line(host: str) -> None:
    scheduler = ["--host", host, "--store", "s", "--log-dir", "l"]
    gateway = ["--host", host, "--port", "0", "--scheduler", "127.0.0.1:1"]
    with pytest.raises(ConfigError, match="--insecure") as caught:
        settings_of(scheduler)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--insecure"):
        parse_settings(gateway)
    assert settings_of([*scheduler, "--insecure"]).host == host
    assert parse_settings([*gateway, "--insecure"]).host == host


def test_a_scheduler_that_would_be_open_does_not_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--store", f"{tmp_path}/s", "--log-dir", f"{tmp_path}/l", "--port", "0"]
    assert main(["--host", "0.0.0.0", *options]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "--insecure" in said
    assert not (tmp_path / "s").exists()


# ---- calls without a proxy ----


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


def test_a_port_is_not_promised_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rose.addresses, "FREE", rose.addresses.FREE[-40:])
    monkeypatch.setattr(rose.addresses, "_promised", set())
    ports = [rose.addresses.free_port() for _ in range(20)]
    assert len(set(ports)) == len(ports)
    with pytest.raises(ConfigError, match="30 ports of"):
        rose.addresses.free_ports(30)
    assert rose.addresses.free_port()

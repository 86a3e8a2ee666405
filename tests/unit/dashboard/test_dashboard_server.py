"""The dashboard's port: who may read, what browsers are told, and streams that end."""

import asyncio
import base64
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest

from elastic_scheduler import HarvestMode
from rose.addresses import free_port
from rose.dashboard import DashboardServer, DashboardSettings, Watch
from rose.dashboard.page import assets
from rose.dashboard.pages import PATHS
from rose.dashboard.server import HEADERS
from rose.dashboard.watch import MOST_VIEWERS, BusyError
from rose.errors import ConfigError
from rose.main.scheduler import settings_of
from rose.security import CertificateFiles, Role
from tests.harness.certificates import Certificates
from tests.harness.dashboard_fleet import DashboardFleet
from tests.harness.waiting import PATIENCE_S

STATIC = Path(__file__).parents[3] / "rose" / "dashboard" / "static"
TOKEN = "0123456789abcdef"


@contextlib.asynccontextmanager
async def served(
    fleet: DashboardFleet,
    files: CertificateFiles | None = None,
    **settings: object,
) -> AsyncIterator[tuple[Watch, str]]:
    watch = fleet.play(2).watch()
    where = DashboardSettings(free_port(), **settings)  # type: ignore[arg-type]
    server = DashboardServer(watch, where, files)
    await server.start()
    scheme = "https" if files and where.host != "127.0.0.1" else "http"
    try:
        yield watch, f"{scheme}://127.0.0.1:{where.port}"
    finally:
        await server.close()
        watch.close()


async def test_every_answer_forbids_what_pages_do_not_need() -> None:
    async with served(DashboardFleet(3)) as (_, url), aiohttp.ClientSession() as session:
        for path, status in (
            *((path, 200) for path in PATHS),
            ("/series", 200),
            ("/series?node=nobody", 404),
            ("/static/dashboard.js", 200),
            ("/static/..%2fserver.py", 404),
            ("/nowhere", 404),
            ("/events?at=/nowhere", 404),
            ("/events?at=//[", 404),
        ):
            async with session.get(url + path) as answer:
                assert (path, answer.status) == (path, status)
                policy = answer.headers["Content-Security-Policy"]
                assert policy == HEADERS["Content-Security-Policy"]
                assert "unsafe" not in policy
                assert policy.startswith("default-src 'none'")
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for method in ("POST", "PUT", "DELETE"):
            async with session.request(method, url + "/") as answer:
                assert answer.status == 405


async def test_on_loopback_only_names_of_this_machine_are_answered() -> None:
    async with served(DashboardFleet(1)) as (_, url), aiohttp.ClientSession() as session:
        for host, status in (
            ("localhost:7480", 200), ("127.0.0.1", 200), ("[::1]:7480", 200),
            ("rebound.example", 421), ("", 421),
        ):  # fmt: skip
            async with session.get(url, headers={"Host": host}) as answer:
                assert (host, answer.status) == (host, status)


async def test_a_token_is_asked_for_where_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    basic = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
    async with (
        served(DashboardFleet(1), token_file=file) as (_, url),
        aiohttp.ClientSession() as session,
    ):
        for given, status in (
            ("", 401), (f"Bearer {TOKEN}", 200), (f"Basic {basic}", 200), ("Bearer x", 401),
            ("Basic %%%", 401), ("Basic /w==", 401), ("Digest x", 401), (f"Bearer {TOKEN}x", 401),
        ):  # fmt: skip
            for path in ("/", "/events", "/series", "/static/dashboard.js"):
                headers = {"Authorization": given} if given else {}
                async with session.get(url + path, headers=headers) as answer:
                    assert (given, path, answer.status) == (given, path, status)
                    if status == 401:
                        assert answer.headers["WWW-Authenticate"].startswith("Basic ")
        file.write_text("another token, longer")
        async with session.get(url, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert answer.status == 401
        file.unlink()
        async with session.get(url, headers={"Authorization": "Bearer "}) as answer:
            assert answer.status == 401


async def test_over_the_network_an_operators_certificate_is_asked_for(tmp_path: Path) -> None:
    made = Certificates(tmp_path / "ca")
    files = made.of(Role.SCHEDULER, "s0")
    operator, trainer = made.of(Role.OPERATOR, "ada"), made.of(Role.TRAINER, "grpo")
    viewer = made.of(Role.VIEWER, "auditor")
    async with served(DashboardFleet(1), files, host="0.0.0.0") as (_, url):
        for shown, status in ((operator, 200), (viewer, 200), (trainer, 401), (None, 401)):
            context = ssl.create_default_context(cafile=str(made.ca.file))
            context.check_hostname = False
            if shown is not None:
                context.load_cert_chain(shown.paths[1], shown.paths[2])
            async with (
                aiohttp.ClientSession() as session,
                session.get(url, ssl=context) as answer,
            ):
                assert answer.status == status


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--dashboard-port", "0"], "1 to 65535"),
        (["--dashboard-port", "7480", "--dashboard-host", "0.0.0.0"], "--insecure"),
        (["--dashboard-token-file", "f"], "--dashboard-port"),
        (["--prometheus", "http://p:9090"], "--prometheus is of a dashboard"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(options: list[str], wrong: str) -> None:
    base = ["--store", "s", "--log-dir", "l"]
    with pytest.raises(ConfigError, match=wrong) as caught:
        settings_of([*base, *options])
    assert "\n" not in str(caught.value)
    assert settings_of(base).dashboard is None


@pytest.mark.parametrize("token", ["123", None], ids=["short", "missing"])
def test_a_token_that_is_too_short_or_missing_is_refused(tmp_path: Path, token: str | None) -> None:
    file = tmp_path / "token"
    if token:
        file.write_text(token)
    with pytest.raises(ConfigError, match="--dashboard-token-file"):
        DashboardServer(Mock(), DashboardSettings(7480, token_file=file))


async def test_a_taken_port_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(DashboardFleet(1)) as (watch, url):
        port = int(url.rpartition(":")[2])
        monkeypatch.setattr("rose.dashboard.server.PATIENCE_S", 0.0)
        with pytest.raises(ConfigError, match="--dashboard-port"):
            await DashboardServer(watch, DashboardSettings(port)).start()


async def test_an_act_is_streamed_at_once() -> None:
    fleet = DashboardFleet(5)
    async with served(fleet) as (watch, url), aiohttp.ClientSession() as session:
        looking = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(PATIENCE_S), session.get(url + "/events?at=/") as answer:
                assert answer.content_type == "text/event-stream"
                assert (await answer.content.readline()).startswith(b"retry:")
                fleet.set_harvest(HarvestMode.HOLD)
                while b"Held by the operator" not in await answer.content.readline():
                    pass
        finally:
            looking.cancel()


async def test_a_viewer_that_leaves_is_forgotten_and_one_too_many_is_refused() -> None:
    watch = DashboardFleet(1).watch()
    await watch.look()
    streams = [watch.messages("/", {}) for _ in range(MOST_VIEWERS)]
    for stream in streams:
        assert (await anext(stream)).startswith(b"data: ")
    with pytest.raises(BusyError):
        await anext(watch.messages("/", {}))
    for stream in streams:
        await stream.aclose()
    assert watch.viewers == 0
    watch.close()


async def test_closing_the_server_ends_its_streams() -> None:
    fleet = DashboardFleet(1)
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
        async with served(fleet) as (_, url):
            answer = await session.get(url + "/events")
            await answer.content.readline()
        await answer.content.read()
        answer.close()


def test_the_vendored_library_is_the_released_one() -> None:
    sums = [line.split() for line in (STATIC / "SHA256SUMS").read_text().splitlines()]
    for digest, name in sums:
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
    assert "MIT License" in (STATIC / "uPlot.LICENSE").read_text()
    assert {name for name in assets() if name.startswith("uPlot")} <= {name for _, name in sums}


def test_no_asset_comes_from_elsewhere() -> None:
    for name in ("dashboard.js", "dashboard.css", "icon.svg"):
        text = assets()[name][0].decode().replace("http://www.w3.org/2000/svg", "")
        found = [word for word in ("http", "@import", "innerHTML", "eval(") if word in text]
        assert found == [], name


def test_pages_load_less_than_they_may() -> None:
    # The HTML's part of the 150 kB is tested beside its rows.
    assert sum(len(body) for body, _ in assets().values()) < 70_000

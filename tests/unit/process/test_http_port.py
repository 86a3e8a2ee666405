"""Every HTTP port bounds its connections and heads, and refuses pages of other sites."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from rose.addresses import free_port
from rose.metrics_server import MetricsServer
from rose.process import http_port
from rose.process.http_port import BoundedSocket, Connections, FewRecords, HttpPort, LimitLog
from rose.weight_distribution.version_server import VersionServer
from tests.harness.waiting import HandClock
from weight_transfer import ChunkStore


@asynccontextmanager
async def port_of(connections: Connections | None = None) -> AsyncIterator[HttpPort]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"{len(await request.read())}")

    app = web.Application()
    app.router.add_route("*", "/", answer)
    port = HttpPort(app, "127.0.0.1", 0, connections=connections)
    await port.start()
    try:
        yield port
    finally:
        await port.close()


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("GET", {"Host": "evil.example"}, 421),
        ("GET", {"Origin": "http://evil.example"}, 403),
        ("POST", {"Origin": "null"}, 403),
        ("POST", {"Origin": "http://localhost:3000", "Content-Type": "application/json"}, 200),
        ("POST", {"Content-Type": "text/plain;charset=UTF-8"}, 415),
        ("POST", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", {"Content-Type": "application/json"}, 200),
        ("POST", {}, 200),
    ],
)
async def test_a_page_of_another_site_reaches_no_loopback_port(
    method: str, headers: dict[str, str], status: int
) -> None:
    async with port_of() as port, aiohttp.ClientSession() as session:
        data = b"{}" if method == "POST" else None
        url = f"http://127.0.0.1:{port.port}/"
        async with session.request(method, url, data=data, headers=headers) as answer:
            assert answer.status == status


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def listening(said: list[str]) -> Iterator[BoundedSocket]:
    with BoundedSocket() as found:
        found.limits = LimitLog(lambda event, **more: said.append(str(more["limit"])), lambda: 0.0)
        found.bind(("127.0.0.1", 0))
        found.listen(8)
        yield found


@pytest.fixture
def flood(listening: BoundedSocket) -> Iterator[Callable[[], socket.socket]]:
    """A function that opens one more connection that brings nothing."""
    with ExitStack() as stack:
        address = listening.getsockname()
        yield lambda: stack.enter_context(socket.create_connection(address))


async def test_sockets_beyond_the_bound_are_closed_before_a_handshake(
    listening: BoundedSocket, flood: Callable[[], socket.socket], said: list[str]
) -> None:
    listening.capacity = 2
    for _ in range(4):
        flood()
    kept = [listening.accept()[0] for _ in range(2)]
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            listening.accept()
    kept.pop().close()
    flood()
    kept.append(listening.accept()[0])
    for each in kept:
        each.close()
    assert said == ["max_connections"]


def test_accepted_connections_that_are_closed_leave_no_descriptor(
    listening: BoundedSocket,
) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        with socket.create_connection(listening.getsockname()):
            listening.accept()[0].close()
    assert len(os.listdir("/proc/self/fd")) == open_before


async def test_a_connection_without_descriptors_is_closed_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
    listening: BoundedSocket,
    flood: Callable[[], socket.socket],
    said: list[str],
) -> None:
    opened = [flood() for _ in range(2)]
    full = OSError(errno.EMFILE, "Too many open files")
    accept = Mock(side_effect=[full, DEFAULT, full, DEFAULT], wraps=listening._accept)
    monkeypatch.setattr(listening, "_accept", accept)
    for sock in opened:
        with pytest.raises(BlockingIOError):
            listening.accept()
        assert sock.recv(1) == b""
    assert said == ["descriptors"]


@pytest.mark.parametrize("kind", ["metrics", "versions"])
async def test_connections_that_bring_nothing_are_closed_everywhere(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    scraped: Any = SimpleNamespace(registry=CollectorRegistry(), look=lambda: None)
    monkeypatch.setattr(http_port, "MAX_SIDE_CONNECTIONS", 3)
    server = (
        MetricsServer(scraped, "127.0.0.1", port)
        if kind == "metrics"
        else VersionServer(ChunkStore(tmp_path), port)
    )
    await server.start()
    try:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        for _, each in [*idle, (reader, writer)]:
            each.close()
    finally:
        await server.close()


def test_records_beyond_the_bound_wait_for_the_next_minute() -> None:
    clock = HandClock()
    few = FewRecords(clock)
    record = http_port._log.makeRecord("x", 30, "f", 1, "m", (), None)
    passed = [few.filter(record) for _ in range(http_port.RECORDS_A_MINUTE + 5)]
    assert passed.count(True) == http_port.RECORDS_A_MINUTE
    clock.now_s += http_port.MINUTE_S
    assert few.filter(record)

"""Every HTTP port bounds its connections and heads, and refuses pages of other sites."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from rose.addresses import free_port
from rose.metrics_server import MetricsServer
from rose.process import http_port
from rose.process.http_port import BoundedSocket, Connections, FewRecords, HttpPort, LimitLog
from rose.weight_distribution.version_server import VersionServer
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


class Flood:
    """Sockets that connect and bring nothing."""

    def __init__(self, port: int, count: int) -> None:
        self.sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]

    def close(self) -> None:
        for each in self.sockets:
            each.close()


async def test_sockets_beyond_the_bound_are_closed_before_a_handshake() -> None:
    said: list[str] = []
    limits = LimitLog(lambda event, **fields: said.append(str(fields["limit"])), lambda: 0.0)
    with BoundedSocket() as listening:
        listening.capacity, listening.limits = 2, limits
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        flood = Flood(listening.getsockname()[1], 4)
        kept = [listening.accept()[0] for _ in range(2)]
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                listening.accept()
        kept.pop().close()
        flood.sockets.append(socket.create_connection(listening.getsockname()))
        kept.append(listening.accept()[0])
        for each in kept:
            each.close()
        flood.close()
    assert said == ["max_connections"]


def test_accepted_connections_that_are_closed_leave_no_descriptor() -> None:
    with BoundedSocket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(8):
            with socket.create_connection(listening.getsockname()):
                listening.accept()[0].close()
        assert len(os.listdir("/proc/self/fd")) == open_before


async def test_a_connection_without_descriptors_is_closed_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    limits = LimitLog(lambda event, **fields: said.append(str(fields["limit"])), lambda: 0.0)
    with BoundedSocket() as listening:
        listening.limits = limits
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        flood = Flood(listening.getsockname()[1], 2)
        accept, calls = listening._accept, iter([True, False, True, False])

        def full() -> tuple[int, object]:
            if next(calls):
                raise OSError(errno.EMFILE, "Too many open files")
            return accept()

        monkeypatch.setattr(listening, "_accept", full)
        for sock in flood.sockets:
            with pytest.raises(BlockingIOError):
                listening.accept()
            assert sock.recv(1) == b""
        flood.close()
    assert said == ["descriptors"]


class Scraped:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def look(self) -> None:
        """Count nothing."""


@pytest.mark.parametrize("kind", ["metrics", "versions"])
async def test_connections_that_bring_nothing_are_closed_everywhere(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    monkeypatch.setattr(http_port, "MAX_SIDE_CONNECTIONS", 3)
    server = (
        MetricsServer(Scraped(), "127.0.0.1", port)
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
    now_s = [0.0]
    few = FewRecords(lambda: now_s[0])
    record = http_port._log.makeRecord("x", 30, "f", 1, "m", (), None)
    passed = [few.filter(record) for _ in range(http_port.RECORDS_A_MINUTE + 5)]
    assert passed.count(True) == http_port.RECORDS_A_MINUTE
    now_s[0] = http_port.MINUTE_S
    assert few.filter(record)

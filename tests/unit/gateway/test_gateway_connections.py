"""Connections that bring nothing cost callers nothing: bounded in number and in time."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from gateway_cases import base_url, entry, gateway_with, until
from wire_cases import VLLM, ask, vllm_body

from rose.gateway import Gateway
from rose.process.http_port import HEAD_GRACE_S, IDLE_S, QUIET_S, Connections, LimitLog
from tests.fakes.replica import StandInReplica

HALF = b"POST /health HTTP/1.1\r\nHost: localhost\r\nX: "


class FakeConnection:
    def __init__(self) -> None:
        self.closed = False

    def abort(self) -> None:
        self.closed = True

    hang_up = abort


class Book:
    """`Connections` on a clock that the test sets, with what was said."""

    def __init__(self, capacity: int) -> None:
        self.now_s = 0.0
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.limits = LimitLog(lambda *a, **k: self.said.append((a[0], k)), lambda: self.now_s)
        self.open = Connections(capacity, 10.0, self.limits, lambda: self.now_s)

    def new(self, idle: bool = False) -> FakeConnection | None:
        connection: Any = FakeConnection()
        if not self.open.admit(connection):
            return None
        if idle:
            self.open.began(connection)
            self.open.answered(connection)
        return connection


def test_a_head_that_does_not_come_closes_its_connection() -> None:
    book = Book(9)
    late, early = book.new(), book.new()
    assert None not in (late, early)
    book.now_s = 9.0
    book.open.began(early)
    book.now_s = 10.5
    book.open.sweep()
    assert (late.closed, early.closed, len(book.open)) == (True, False, 1)


def test_the_next_head_has_its_time_from_its_first_byte() -> None:
    book = Book(9)
    idle = book.new(idle=True)
    assert idle
    book.now_s = 100.0
    book.open.heard(idle)
    book.now_s = 109.0
    book.open.sweep()
    assert not idle.closed
    book.now_s = 111.0
    book.open.sweep()
    assert idle.closed


def test_an_idle_connection_is_kept_for_long_but_not_for_ever() -> None:
    book = Book(9)
    idle = book.new(idle=True)
    assert idle
    book.now_s = IDLE_S - 1
    book.open.sweep()
    assert not idle.closed
    book.now_s = IDLE_S + 1
    book.open.sweep()
    assert idle.closed


def test_at_the_bound_the_connection_that_is_idle_for_longest_makes_room() -> None:
    book = Book(3)
    first, second = book.new(idle=True), book.new(idle=True)
    busy = book.new()
    assert None not in (first, second, busy)
    book.open.began(busy)
    assert book.new()
    assert (first.closed, second.closed, busy.closed) == (True, False, False)


def test_at_the_bound_a_late_head_makes_room_and_a_young_one_does_not() -> None:
    book = Book(1)
    silent = book.new()
    assert silent
    assert book.new() is None
    book.now_s = HEAD_GRACE_S + 0.1
    assert book.new() is not None
    assert silent.closed


def test_a_limit_is_told_when_it_begins_to_bite_and_when_it_is_over() -> None:
    book = Book(1)
    book.new()
    for _ in range(50):
        assert book.new() is None
    assert book.said == [("limit_reached", {"limit": "max_connections", "times": 1})]
    book.now_s = QUIET_S + 1
    book.limits.sweep()
    assert book.said[1:] == [("limit_over", {"limit": "max_connections", "times": 50})]


async def connect(gateway: Gateway, data: bytes) -> tuple[Any, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data)
    return reader, writer


async def test_half_requests_keep_nobody_from_the_gateway_for_long() -> None:
    async with (
        StandInReplica() as replica,
        gateway_with(
            entry(replica, "guest-0"), max_connections=4, head_timeout_s=0.2, shutdown_s=0.1
        ) as gw,
    ):
        halves = [await connect(gw, HALF) for _ in range(4)]
        reader, writer = await connect(gw, b"")
        refused = await reader.read()
        writer.close()
        assert all(part in refused for part in (b" 503 ", b"Retry-After"))
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == 503
        assert [await reader.read() for reader, _ in halves] == [b""] * 4
        async with aiohttp.ClientSession(base_url(gw)) as session:
            assert (await ask(session, VLLM, vllm_body(2)))[0] == 200


@pytest.mark.parametrize("path", [VLLM, "/generate", "/tokenize", "/finish_session"])
async def test_a_body_that_does_not_come_is_408(path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n".encode()
    async with gateway_with(body_timeout_s=0.05) as gw:
        reader, writer = await connect(gw, head + b'{"token_ids": [')
        answer = await reader.readuntil(b"}}")
        writer.close()
    assert b" 408 " in answer
    assert "faster" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_idle_connections_give_way_to_new_ones() -> None:
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with gateway_with(max_connections=2) as gw:
        kept = [await connect(gw, health) for _ in range(2)]
        for reader, _ in kept:
            await reader.readuntil(b"}")
        book = gw._server.connections
        await until(lambda: book.idle == 2)
        fresh, _ = await connect(gw, health)
        assert b" 200 " in await fresh.readuntil(b"}")
        await kept[0][0].read()
        assert len(book) == 2
        for _, writer in kept:
            writer.close()

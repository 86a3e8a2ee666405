"""Connections that bring nothing cost callers nothing: bounded in number and in time."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from rose.gateway import Gateway
from rose.process.http_port import HEAD_GRACE_S, IDLE_S, QUIET_S, Connections, LimitLog
from tests.unit.gateway.gateway_cases import base_url, gateway_with, serving, until
from tests.unit.gateway.wire_cases import VLLM, ask, vllm_body

HALF = b"POST /health HTTP/1.1\r\nHost: localhost\r\nX: "


class Book:
    """`Connections` on a clock that the test sets, with what was said."""

    def __init__(self, capacity: int) -> None:
        self.now_s = 0.0
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.limits = LimitLog(lambda *a, **k: self.said.append((a[0], k)), lambda: self.now_s)
        self.open = Connections(capacity, 10.0, self.limits, lambda: self.now_s)

    def new(self, idle: bool = False) -> Any:
        connection: Any = Mock(closed=False)
        connection.abort = connection.hang_up = lambda: setattr(connection, "closed", True)
        if not self.open.admit(connection):
            return None
        if idle:
            self.open.began(connection)
            self.open.answered(connection)
        return connection


@pytest.mark.parametrize(
    ("idle", "heard_s", "began_s", "closed_s"),
    [
        # A head that does not come closes its connection; one that comes in time does not.
        (False, None, None, 10.0),
        (False, None, 9.0, None),
        # The next head has its time from its first byte.
        (True, 100.0, None, 110.0),
        # An idle connection is kept for long, and not for ever.
        (True, None, None, IDLE_S),
    ],
)
def test_a_connection_that_brings_nothing_is_closed_in_time(
    idle: bool, heard_s: float | None, began_s: float | None, closed_s: float | None
) -> None:
    book = Book(9)
    connection: Any = book.new(idle=idle)
    for at_s, happens in ((heard_s, book.open.heard), (began_s, book.open.began)):
        if at_s is not None:
            book.now_s = at_s
            happens(connection)
    book.now_s = (closed_s or 2 * IDLE_S) - 0.5
    book.open.sweep()
    assert not connection.closed
    book.now_s += 1.0
    book.open.sweep()
    assert connection.closed == (closed_s is not None)
    assert len(book.open) == (closed_s is None)


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
    async with serving(max_connections=4, head_timeout_s=0.2) as (_, gw, _):
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

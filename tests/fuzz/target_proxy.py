"""Fuzz targets of a node's proxy: what callers send it, and what engines answer.

Whatever the bytes are, an engine gets one request at a time, on a route of turns, in a head that
the proxy wrote, with no byte more than its length says.
"""

import asyncio
import functools
import re
from typing import Any, Final

from rose.proxy.callers import CallerConnection, Door, EngineConnection, LoopbackPool
from rose.proxy.requests import PATHS
from tests.fuzz.wire import FuzzTransport

PORTS: Final = {b"g0": 7001, b"a/b": 7002}
GOOD: Final = (
    b"POST /g0/rose/v1/generate HTTP/1.1\r\nHost: n\r\nContent-Type: application/json\r\n"
    b"Content-Length: 2\r\n\r\n{}"
)
ANSWER: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
SEEDS: Final = {
    "run_request": [GOOD, GOOD + GOOD, GOOD.replace(b"g0", b"a%2Fb"), GOOD[:-2]],
    "run_request_by_bytes": [GOOD, GOOD.replace(b"Content-Length: 2", b"Content-Length: 02")],
    "run_request_after_an_answer": [GOOD, GOOD.replace(b"generate", b"admit")],
    "run_answer": [ANSWER, ANSWER[:-5], ANSWER + ANSWER, ANSWER.replace(b"chunked", b"gzip")],
}
HEAD: Final = re.compile(
    rb"POST (/[^ ]*) HTTP/1\.1\r\nhost: 127\.0\.0\.1:700[12]\r\n"
    rb"(?:(?:content-type|accept|traceparent|tracestate): [^\r\n]*\r\n)*"
    rb"content-length: (\d+)\r\n\r\n"
)


class _Strict(FuzzTransport):
    def write(self, data: Any) -> None:
        assert not self.closed, "nothing is said to somebody who hung up"
        super().write(data)


class _Pool(LoopbackPool):
    """Always has a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.transports: list[_Strict] = []
        self.taken: list[EngineConnection] = []

    def take(self, port: int) -> EngineConnection:
        connection, transport = EngineConnection([]), _Strict()
        connection.connection_made(transport)
        self.taken.append(connection)
        self.transports.append(transport)
        return connection


class _Bench:
    """One connection of a caller, and the engines that it reached."""

    def __init__(self) -> None:
        self.pool = _Pool()
        door = Door(PORTS, None, lambda: 0.0, lambda who, why: None, engines=self.pool)
        self.caller, self.transport = CallerConnection(door), _Strict()
        self.caller.connection_made(self.transport)

    def feed(self, data: bytes) -> None:
        if not self.transport.closed:
            self.caller.data_received(data)

    def end(self) -> None:
        self.caller.connection_lost(None)
        for transport in self.pool.transports:
            _insist_whole(bytes(transport.sent))


def run_request(data: bytes) -> None:
    """Bytes of a caller, at once."""
    _played([data], [])


def run_request_by_bytes(data: bytes) -> None:
    """The same, one by one."""
    _played([data[at : at + 1] for at in range(min(len(data), 2_000))], [])


def run_request_after_an_answer(data: bytes) -> None:
    """On a connection that was used before."""
    bench = _played([GOOD, data], [ANSWER])
    assert bench.transport.sent.startswith(ANSWER)


def run_answer(data: bytes) -> None:
    """Bytes of an engine: they go on as they are, or the caller is hung up on."""
    bench = _played([GOOD], [data])
    assert data.startswith(bench.transport.sent)


def _played(requests: list[bytes], answers: list[bytes]) -> _Bench:
    async def play() -> _Bench:
        bench, left = _Bench(), list(answers)
        for request in requests:
            bench.feed(request)
            if left and bench.pool.taken:
                bench.pool.taken[-1].data_received(left.pop(0))
        bench.end()
        return bench

    return _loop().run_until_complete(play())


def _insist_whole(sent: bytes) -> None:
    head = HEAD.match(sent)
    assert head, sent[:200]
    assert head[1].partition(b"?")[0] in PATHS, head[1]
    assert len(sent) - head.end() <= int(head[2]), "not a byte more than was said"


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()

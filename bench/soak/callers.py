"""Callers over bare sockets, and the ways in which a turn of theirs can end.

An HTTP client would keep connections, retry and leave garbage of its own in the process that a
test looks at.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

LAST_CHUNK = b"0\r\n\r\n"
HUNG_UP = 0


class SoakAnswer(NamedTuple):
    """`status` is HUNG_UP where the connection ended before the answer did, whoever ended it."""

    status: int
    body: bytes


class Caller:
    """One connection, one request at a time; it is opened anew when it was closed."""

    def __init__(self, port: int, on_data: Callable[[float], None] | None = None) -> None:
        self._port = port
        self._on_data = on_data
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[SoakAnswer] | None = None
        self._data = b""
        self._wanted = -1

    async def ask(
        self,
        path: str,
        body: bytes,
        hang_up_after_s: float | None = None,
        hang_up_at: bytes = b"",
        method: str = "POST",
    ) -> SoakAnswer:
        """Send a request and return its answer.

        `hang_up_after_s` seconds, or at `hang_up_at` in what came, the connection is closed.
        """
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: _Line(self), "127.0.0.1", self._port)
        assert self._transport is not None
        waiting: asyncio.Future[SoakAnswer] = loop.create_future()
        self._waiting = waiting
        self._data, self._wanted, self._leave_at = b"", -1, hang_up_at
        self._transport.write(
            b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (method.encode(), path.encode(), len(body), body)
        )
        timer = None
        if hang_up_after_s is not None:
            timer = loop.call_later(hang_up_after_s, self.hang_up)
        answer = await waiting
        if timer is not None:
            timer.cancel()
        return answer

    def hang_up(self) -> None:
        """Close the connection, whatever it still waits for."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._answer(HUNG_UP)

    def opened(self, transport: asyncio.Transport) -> None:
        """There is a connection."""
        self._transport = transport

    def lost(self, transport: asyncio.Transport) -> None:
        """A connection is gone; it may be an earlier one."""
        if transport is self._transport:
            self.hang_up()

    def received(self, data: bytes) -> None:
        """More of the answer."""
        if self._on_data is not None:
            self._on_data(time.monotonic())
        self._data += data
        if self._leave_at and self._leave_at in self._data:
            self.hang_up()
            return
        head, mark, body = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        if self._wanted < 0:
            _, counted, rest = head.lower().partition(b"content-length: ")
            self._wanted = int(rest.split(b"\r\n", 1)[0]) if counted else 0
        whole = len(body) >= self._wanted if self._wanted else body.endswith(LAST_CHUNK)
        if whole:
            self._data = body
            self._answer(int(head.split(b" ", 2)[1]))

    def _answer(self, status: int) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(SoakAnswer(status, self._data))


class _Line(asyncio.Protocol):
    """One connection of a caller."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._caller.opened(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._caller.lost(self._transport)
        del self._transport

    def data_received(self, data: bytes) -> None:
        self._caller.received(data)


GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
TOKENS, LONG = 16, 100_000
# Names come again, as those of trajectories do: what is kept by name is bounded, and full early.
SESSIONS, GROUPS = 256, 256
# Turns of one request of the storm: asking must not cost more than timing out does.
STORM_SAMPLES = 4


class Asker:
    """One of the callers that are busy all the time: `other` is for what a turn needs besides."""

    def __init__(self, port: int, dice: random.Random) -> None:
        self.turns, self.other, self.dice = Caller(port), Caller(port), dice

    def body(self, name: str, number: int, max_tokens: int = TOKENS, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
        """One request; `name` says to the engine what becomes of it."""
        dice = self.dice
        sampling = {"max_tokens": max_tokens, "logprobs": 0, **fields.pop("sampling", {})}
        asked = {
            "request_id": f"{name}-{number}",
            "session_id": f"s{dice.randrange(SESSIONS)}",
            "token_ids": [dice.randrange(90) for _ in range(32)],
            "sampling_params": sampling,
        }
        return json.dumps({**asked, **fields}).encode()

    async def ask(self, asked: bytes, **how: Any) -> SoakAnswer:  # noqa: ANN401 - as Caller.ask
        """One turn."""
        return await self.turns.ask(GENERATE, asked, **how)

    def close(self) -> None:
        self.turns.hang_up()
        self.other.hang_up()


@dataclass(frozen=True, slots=True)
class Way:
    """`share` of all requests go this way, in parts of the sum; any of `statuses` is right.

    One request is `turns` turns.
    """

    name: str
    share: float
    statuses: tuple[int, ...]
    go: Callable[[Asker, int], Awaitable[SoakAnswer]]
    turns: int = 1


def _plain(name: str, **fields: Any) -> Callable[[Asker, int], Awaitable[SoakAnswer]]:  # noqa: ANN401 - JSON
    async def go(asker: Asker, number: int) -> SoakAnswer:
        return await asker.ask(asker.body(name, number, **fields))

    return go


async def _late(asker: Asker, number: int) -> SoakAnswer:
    return await asker.ask(asker.body("late", number, LONG, timeout_s=0.005))


async def _late_samples(asker: Asker, number: int) -> SoakAnswer:
    many = {"n": STORM_SAMPLES}
    return await asker.ask(asker.body("late", number, LONG, timeout_s=0.005, sampling=many))


async def _late_stream(asker: Asker, number: int) -> SoakAnswer:
    return await asker.ask(asker.body("late", number, LONG, timeout_s=0.005, stream=True))


async def _hung_up(asker: Asker, number: int) -> SoakAnswer:
    return await asker.ask(asker.body("left", number, LONG), hang_up_after_s=0.005)


async def _hung_up_stream(asker: Asker, number: int) -> SoakAnswer:
    asked = asker.body("left", number, LONG, stream=True)
    return await asker.ask(asked, hang_up_at=b"data: ")


async def _resumed(asker: Asker, number: int) -> SoakAnswer:
    asked = asker.body("resumed", number, 64, stream=True)
    await asker.ask(asked, hang_up_at=b"data: ")
    return await asker.ask(asked)


async def _twice(asker: Asker, number: int) -> SoakAnswer:
    asked = asker.body("twice", number)
    await asker.ask(asked)
    return await asker.ask(asked)


async def _aborted(asker: Asker, number: int) -> SoakAnswer:
    turn = asyncio.ensure_future(asker.ask(asker.body("aborted", number, LONG)))
    names = json.dumps({"request_ids": [f"aborted-{number}"]}).encode()
    done: set[asyncio.Future[SoakAnswer]] = set()
    while not done:
        done, _ = await asyncio.wait({turn}, timeout=0.02)
        # Until it is known there: the other connection may be read first.
        await asker.other.ask(ABORT, names)
    return turn.result()


async def _group(asker: Asker, number: int) -> SoakAnswer:
    group = {"group_id": f"g{number % GROUPS}", "group_size": 2, "hedges": 1}
    sampling = {"n": 2}
    return await asker.ask(asker.body("group", number, 64, sampling=sampling, **group))


WAYS = (
    Way("whole", 36, (200,), _plain("whole")),
    Way("streamed", 18, (200,), _plain("streamed", stream=True)),
    Way("samples", 2, (200,), _plain("samples", sampling={"n": 3}), turns=3),
    Way("group with copies", 1, (200,), _group, turns=2),
    Way("asked again", 2, (200,), _twice),
    Way("left and resumed", 1, (200,), _resumed),
    Way("deadline", 12, (504,), _late),
    # 200 where tokens were streamed before.
    Way("deadline, streamed", 6, (504, 200), _late_stream),
    Way("caller hangs up", 8, (HUNG_UP,), _hung_up),
    Way("caller hangs up, streamed", 6, (HUNG_UP,), _hung_up_stream),
    Way("aborted", 2, (409,), _aborted),
    Way("version never comes", 1, (409,), _plain("version", min_version=9)),
    Way("bad input", 3, (400,), _plain("bad", sampling={"temperature": -1})),
    Way("refused by replica", 1, (400,), _plain("refused")),
    # A replica that failed rests for half a second: more of these, and none were left.
    Way("revoked by replica", 0.15, (200,), _plain("revoked")),
    Way("revoked again and again", 0.05, (200,), _plain("revoked_again")),
    Way("replica drains", 0.15, (200,), _plain("draining")),
    Way("replica answers 500", 0.1, (200,), _plain("faulty")),
    Way("replica dies", 0.1, (200,), _plain("dies")),
    Way("replica talks nonsense", 0.1, (200,), _plain("garbage")),
    Way("replica goes silent", 0.1, (200,), _plain("silent")),
    Way("all replicas fail", 0.02, (503,), _plain("failing")),
)
# What the storm is made of.
LATE = Way("deadline", 1, (504,), _late_samples, turns=STORM_SAMPLES)

"""Whatever way a turn ends, nothing of it is left for the cyclic collector.

The gateway collects seldom and little (rose.gateway.event_loop): what a turn leaves in cycles
stays.
"""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from bench.load.standin import Pace, listen
from bench.load.streams import HUNG_UP, HttpCaller
from elastic_scheduler import ReplicaKind
from elastic_scheduler import hedging as hedge
from elastic_scheduler.routing import cost
from rose.gateway import Gateway, server
from rose.gateway.replicas import dispatcher
from rose.gateway.turn_request import Sampling, TurnRequest
from rose.gateway.turns import hedging
from rose.process import http_client
from tests.fakes.replica import StandInReplica
from tests.harness.waiting import PATIENCE_S
from tests.unit.gateway.gateway_cases import entry, gateway_with, until
from tests.unit.gateway.wire_cases import VLLM, vllm_body

TURNS = 8
# Far above what any way takes.
HANG_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Nobody looks for cycles in all that was imported, which takes a second where vLLM was."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def body(way: str, number: int, max_tokens: int = 16, **fields: Any) -> bytes:
    return json.dumps(vllm_body(max_tokens, request_id=f"{way}-{number}", **fields)).encode()


class House:
    """A gateway over two stand-in engines, a and b."""

    def __init__(self, gateway: Gateway, paces: list[Pace], ports: list[int]) -> None:
        self.gateway, self.paces, self.ports = gateway, paces, ports
        self.epoch = 1
        self._callers: list[HttpCaller] = []
        self._idle: list[HttpCaller] = []
        self.set_table()

    def set_table(self, names: str = "ab", decode_tok_s: Sequence[float] = (1e6, 1e6)) -> None:
        """The rows of these names, under the lease of now."""
        rows = dict(zip("ab", zip(self.ports, decode_tok_s, strict=True), strict=True))
        self.gateway.set_table(
            tuple(
                entry(
                    StandInReplica(),
                    name,
                    url=f"http://127.0.0.1:{rows[name][0]}",
                    kind=ReplicaKind.DEDICATED,
                    lease_epoch=self.epoch,
                    decode_tok_s=rows[name][1],
                    prefill_tok_s=1e6,
                )
                for name in names
            )
        )

    async def ask(self, asked: bytes, *wanted: int, path: str = VLLM, **how: Any) -> None:
        caller = (
            self._idle.pop() if self._idle else HttpCaller(f"http://127.0.0.1:{self.gateway.port}")
        )
        if caller not in self._callers:
            self._callers.append(caller)
        answer = await caller.post(path, asked, **how)
        self._idle.append(caller)
        assert answer.status in wanted, answer

    async def renew(self) -> None:
        """End all leases; there are new ones at once."""
        self.epoch += 1
        self.set_table()
        await asyncio.sleep(0.01)

    def close(self) -> None:
        for caller in self._callers:
            caller.hang_up()


@asynccontextmanager
async def house(**settings: Any) -> AsyncIterator[House]:
    paces = [Pace(0.001, 0.001, 4) for _ in "ab"]
    servers = [await listen(pace, faulty=True) for pace in paces]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    try:
        async with gateway_with(**{"max_attempts": 5, **settings}) as gateway:
            made = House(gateway, paces, ports)
            try:
                yield made
            finally:
                made.close()
    finally:
        # A loop of uvloop with an open server never closes.
        for each in servers:
            each.close()


@dataclass(frozen=True)
class PlainWay:
    """A request's fault (the first word of its id), its answer's statuses, its body, and how it is
    sent.
    """

    fault: str
    wanted: tuple[int, ...] = (200,)
    fields: dict[str, Any] = field(default_factory=dict)
    tokens: int = 16
    how: dict[str, Any] = field(default_factory=dict)

    async def __call__(self, case: House, number: int) -> None:
        await case.ask(
            body(self.fault, number, self.tokens, **deepcopy(self.fields)), *self.wanted, **self.how
        )


STREAM: dict[str, Any] = {"stream": True}
THREE: dict[str, Any] = {"sampling": {"n": 3}}
LATE: dict[str, Any] = {"timeout_s": 0.03}
SOON, AT_TOKENS = {"hang_up_after_s": 0.01}, {"hang_up_at": b"data: "}
WAYS: dict[str, Callable[[House, int], Awaitable[None]]] = {
    "whole": PlainWay("whole"),
    "streamed": PlainWay("whole", fields=STREAM),
    "samples": PlainWay("n", fields=THREE),
    "samples_streamed": PlainWay("n", fields=THREE | STREAM),
    "deadline": PlainWay("silent", (504,), LATE),
    "deadline_streamed": PlainWay("silent", (200, 504), LATE | STREAM),
    "deadline_of_samples": PlainWay("late", (504,), LATE | THREE, 4_000),
    "deadline_of_samples_streamed": PlainWay("late", (200, 504), LATE | THREE | STREAM, 4_000),
    "hung_up": PlainWay("long", (HUNG_UP,), {}, 4_000, SOON),
    "hung_up_in_a_stream": PlainWay("long", (HUNG_UP,), STREAM, 4_000, AT_TOKENS),
    "hung_up_with_samples": PlainWay("long", (HUNG_UP,), THREE, 4_000, SOON),
    "hung_up_in_a_stream_of_samples": PlainWay(
        "long", (HUNG_UP,), THREE | STREAM, 4_000, AT_TOKENS
    ),
    "hung_up_while_waiting": PlainWay("wait", (HUNG_UP,), {"min_version": 9}, 16, SOON),
    "revoked": PlainWay("revoked"),
    "revoked_in_a_stream": PlainWay("revoked", fields=STREAM),
    "revoked_again_and_again": PlainWay("revoked_again"),
    "draining": PlainWay("draining"),
    "refused": PlainWay("refused", (400,)),
    "faulty": PlainWay("faulty"),
    "failing": PlainWay("failing", (503,)),
    "failing_in_a_stream": PlainWay("failing", (503,), STREAM),
    "dies": PlainWay("dies"),
    "garbage": PlainWay("garbage"),
    "version_over": PlainWay("version", (409,), {"exact_version": 9}),
    "bad_input": PlainWay("bad", (400,), {"sampling": {"temperature": -1}}),
}
# By the first word of a way's name.
SETTINGS: dict[str, dict[str, Any]] = {
    "hedged": {"stall_s": 9.0},
    # A renewal ends all turns' leases, and each turn renews three times.
    "lease": {"max_attempts": 3 * TURNS + 1},
    "no": {"queue_wait_s": 0.1},
}


def way(made: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    WAYS[made.__name__] = made
    return made


@way
async def asked_twice(case: House, number: int) -> None:
    asked = body("twice", number)
    await asyncio.gather(case.ask(asked, 200), case.ask(asked, 200))


@way
async def stalled(case: House, number: int) -> None:
    # One at a time: a replica on which many are silent counts as slow, and none goes there.
    if number % TURNS == 0:
        case.set_table("ab", (1e6, 1e5))
        for k in range(TURNS):
            await case.ask(body("silent", number + k), 200)


@way
async def lease_lost(case: House, number: int) -> None:
    turn = asyncio.ensure_future(case.ask(body("long", number, 64), 200))
    for _ in range(3):
        await asyncio.sleep(0.005)
        await case.renew()
    await turn


async def ended_by(case: House, number: int, path: str, asked: Any, **fields: Any) -> None:
    """A turn that a request of another route ends: 409, or 200 where tokens were streamed."""
    wanted = (200, 409) if "stream" in fields else (409,)
    turn = asyncio.ensure_future(case.ask(body("long", number, 4_000, **fields), *wanted))
    await asyncio.sleep(0.01)
    await case.ask(json.dumps(asked).encode(), 200, path=path)
    await turn


@way
async def aborted(case: House, number: int, **fields: Any) -> None:
    names = {"request_ids": [f"long-{number}"]}
    await ended_by(case, number, "/inference/v1/abort_requests", names, **fields)


@way
async def aborted_in_a_stream(case: House, number: int) -> None:
    await aborted(case, number, stream=True)


@way
async def session_finished(case: House, number: int) -> None:
    await ended_by(case, number, "/finish_session", {"session_id": "s"}, session_id="s")


@way
async def cancelled_before_it_began(case: House, number: int) -> None:
    turns = case.gateway._server._turns
    turns.open(TurnRequest(f"unbegun-{number}", [1, 100], Sampling(max_tokens=16)))
    assert turns.cancel(f"unbegun-{number}")
    await asyncio.sleep(0)


@way
async def resumed(case: House, number: int) -> None:
    asked = body("long", number, 64, stream=True)
    await case.ask(asked, HUNG_UP, **AT_TOKENS)
    await case.ask(asked, 200)


@way
async def no_replica(case: House, number: int) -> None:
    case.set_table("")
    await case.ask(body("none", number), 503)


@way
async def no_json(case: House, number: int) -> None:
    del number
    await case.ask(b"{", 400)


async def before_hedged(case: House) -> None:
    """Nothing is known of a, which says that it is fast; b's pace is known from a turn there."""
    case.set_table("b")
    await case.ask(body("known", 0), 200)
    case.set_table("ab", (1e6, 1e3))


def hedged(
    gaps_s: tuple[float, float], wanted: int, how: dict[str, Any], **fields: Any
) -> Callable[[House, int], Awaitable[None]]:
    """A turn which begins on a; as soon as its pace is known it has a copy on b."""

    async def turn(case: House, number: int) -> None:
        case.paces[0].gap_s, case.paces[1].gap_s = gaps_s
        group = {"group_id": f"g{number}", "group_size": 1, "hedges": 1}
        await case.ask(body("hedged", number, 24, **group, **fields), wanted, **how)

    return turn


WAYS |= {
    "hedged_and_the_copy_wins": hedged((0.1, 0.001), 200, {}),
    "hedged_and_the_copy_loses": hedged((0.03, 0.3), 200, {}),
    "hedged_and_hung_up": hedged((0.1, 0.1), HUNG_UP, {"hang_up_after_s": 0.4}),
    "hedged_and_late": hedged((0.1, 0.1), 504, {}, timeout_s=0.4),
}


@contextmanager
def saved() -> Iterator[Callable[[], Counter[str]]]:
    """A collector that is off, and keeps what the caller has it collect: the types of it."""

    def garbage() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage)

    gc.collect()
    gc.disable()
    try:
        yield garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def left_by(name: str) -> Counter[str]:
    """Types of all objects that turns of this way leave in cycles."""
    settings = {"stall_s": 0.03, "version_wait_s": 0.05, "resume_grace_s": 0.05}
    settings |= SETTINGS.get(name.split("_")[0], {})
    async with house(**settings) as case:

        async def turns(first: int) -> None:
            if name.startswith("hedged"):
                await before_hedged(case)
            await asyncio.gather(*(WAYS[name](case, first + k) for k in range(TURNS)))
            await until(lambda: not case.gateway.status().running)
            await asyncio.sleep(0.01)

        await turns(0)
        stats = case.gateway.stats
        hedges = stats.hedges
        with saved() as garbage:
            await turns(TURNS)
            assert stats.hedges > hedges or not name.startswith("hedged")
            return garbage()


def run(work: Awaitable[Counter[str]]) -> Counter[str]:
    # The loop that gateways run on: asyncio's own leaves a cycle for each of its connections.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, HANG_S))


@pytest.mark.parametrize("name", WAYS)
def test_a_turn_leaves_no_cycles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_S", 0.01)
    # A slow machine is no dead engine.
    monkeypatch.setattr(http_client, "CONNECT_S", PATIENCE_S)
    monkeypatch.setattr(dispatcher, "REST_S", dict.fromkeys(dispatcher.REST_S, 0.01))
    if name.startswith("hedged"):
        # Whoever may have a copy gets one, at once.
        monkeypatch.setattr(cost, "ENOUGH_FOR_PACE", 1)
        monkeypatch.setattr(hedging, "LEAST_LEFT_S", 0.0)
        monkeypatch.setattr(hedge, "MARGIN", -9.0)
        monkeypatch.setattr(hedge, "DONE_SHARE", 0.0)
    assert not run(left_by(name))


async def left_by_closing() -> Counter[str]:
    with saved() as garbage:
        async with house(shutdown_s=0.01) as case:
            turns = [
                asyncio.ensure_future(
                    case.ask(body(f"long_{stream}", k, 4_000, stream=stream), 200, 503)
                )
                for k in range(TURNS)
                for stream in (False, True)
            ]
            await until(lambda: sum(case.gateway.status().live_turns.values()) == 2 * TURNS)
            await asyncio.gather(case.gateway._server.close(), *turns)
            return garbage()


def test_turns_that_a_closing_gateway_ends_leave_no_cycles() -> None:
    assert not run(left_by_closing())

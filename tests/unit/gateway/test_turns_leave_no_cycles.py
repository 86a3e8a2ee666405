"""Whatever way a turn ends, nothing of it is left for the cyclic collector.

The gateway collects seldom and little (rose.gateway.event_loop): what a turn leaves in cycles
stays.
"""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from gateway_cases import gateway_with, until

from bench.load.standin import Pace, listen
from bench.load.streams import HUNG_UP, HttpCaller
from elastic_scheduler import ReplicaKind
from elastic_scheduler import hedging as hedge
from elastic_scheduler.routing import cost
from rose.gateway import Gateway, ReplicaEntry, server
from rose.gateway.replicas import dispatcher
from rose.gateway.turn_request import Sampling, TurnRequest
from rose.gateway.turns import hedging
from rose.process import http_client
from tests.harness.waiting import PATIENCE_S

GENERATE = "/inference/v1/generate"
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
    asked = {
        "request_id": f"{way}-{number}",
        "token_ids": [1, 100],
        "sampling_params": {"max_tokens": max_tokens, "logprobs": 0, **fields.pop("sampling", {})},
        **fields,
    }
    return json.dumps(asked).encode()


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
                ReplicaEntry(
                    id=name,
                    kind=ReplicaKind.DEDICATED,
                    url=f"http://127.0.0.1:{rows[name][0]}",
                    leased=True,
                    lease_epoch=self.epoch,
                    healthy=True,
                    policy_version=0,
                    max_sequences=64,
                    decode_tok_s=rows[name][1],
                    prefill_tok_s=1e6,
                )
                for name in names
            )
        )

    async def ask(self, asked: bytes, *wanted: int, path: str = GENERATE, **how: Any) -> None:
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


Way = Callable[[House, int], Awaitable[None]]
WAYS: dict[str, Way] = {}
# By the first word of a way's name.
SETTINGS: dict[str, dict[str, Any]] = {
    "hedged": {"stall_s": 9.0},
    # A renewal ends all turns' leases, and each turn renews three times.
    "lease": {"max_attempts": 3 * TURNS + 1},
    "no": {"queue_wait_s": 0.1},
}


def way(made: Way) -> Way:
    WAYS[made.__name__] = made
    return made


@way
async def whole(case: House, number: int) -> None:
    await case.ask(body("whole", number), 200)


@way
async def streamed(case: House, number: int) -> None:
    await case.ask(body("streamed", number, stream=True), 200)


@way
async def samples(case: House, number: int) -> None:
    await case.ask(body("n", number, sampling={"n": 3}), 200)


@way
async def samples_streamed(case: House, number: int) -> None:
    await case.ask(body("n", number, sampling={"n": 3}, stream=True), 200)


@way
async def asked_twice(case: House, number: int) -> None:
    asked = body("twice", number)
    await asyncio.gather(case.ask(asked, 200), case.ask(asked, 200))


@way
async def deadline(case: House, number: int) -> None:
    await case.ask(body("silent", number, timeout_s=0.03), 504)


@way
async def deadline_streamed(case: House, number: int) -> None:
    await case.ask(body("silent", number, timeout_s=0.03, stream=True), 200, 504)


@way
async def deadline_of_samples(case: House, number: int) -> None:
    await case.ask(body("late", number, 4000, timeout_s=0.03, sampling={"n": 3}), 504)


@way
async def deadline_of_samples_streamed(case: House, number: int) -> None:
    asked = body("late", number, 4000, timeout_s=0.03, sampling={"n": 3}, stream=True)
    await case.ask(asked, 200, 504)


@way
async def stalled(case: House, number: int) -> None:
    # One at a time: a replica on which many are silent counts as slow, and none goes there.
    if number % TURNS == 0:
        case.set_table("ab", (1e6, 1e5))
        for k in range(TURNS):
            await case.ask(body("silent", number + k), 200)


@way
async def hung_up(case: House, number: int) -> None:
    await case.ask(body("long", number, 4000), HUNG_UP, hang_up_after_s=0.01)


@way
async def hung_up_in_a_stream(case: House, number: int) -> None:
    await case.ask(body("long", number, 4000, stream=True), HUNG_UP, hang_up_at=b"data: ")


@way
async def hung_up_with_samples(case: House, number: int) -> None:
    asked = body("long", number, 4000, sampling={"n": 3})
    await case.ask(asked, HUNG_UP, hang_up_after_s=0.01)


@way
async def hung_up_in_a_stream_of_samples(case: House, number: int) -> None:
    asked = body("long", number, 4000, sampling={"n": 3}, stream=True)
    await case.ask(asked, HUNG_UP, hang_up_at=b"data: ")


@way
async def hung_up_while_waiting(case: House, number: int) -> None:
    await case.ask(body("wait", number, min_version=9), HUNG_UP, hang_up_after_s=0.01)


@way
async def revoked(case: House, number: int) -> None:
    await case.ask(body("revoked", number), 200)


@way
async def revoked_in_a_stream(case: House, number: int) -> None:
    await case.ask(body("revoked", number, stream=True), 200)


@way
async def revoked_again_and_again(case: House, number: int) -> None:
    await case.ask(body("revoked_again", number), 200)


@way
async def lease_lost(case: House, number: int) -> None:
    turn = asyncio.ensure_future(case.ask(body("long", number, 64), 200))
    for _ in range(3):
        await asyncio.sleep(0.005)
        await case.renew()
    await turn


@way
async def draining(case: House, number: int) -> None:
    await case.ask(body("draining", number), 200)


@way
async def refused(case: House, number: int) -> None:
    await case.ask(body("refused", number), 400)


@way
async def faulty(case: House, number: int) -> None:
    await case.ask(body("faulty", number), 200)


@way
async def failing(case: House, number: int) -> None:
    await case.ask(body("failing", number), 503)


@way
async def failing_in_a_stream(case: House, number: int) -> None:
    await case.ask(body("failing", number, stream=True), 503)


@way
async def dies(case: House, number: int) -> None:
    await case.ask(body("dies", number), 200)


@way
async def garbage(case: House, number: int) -> None:
    await case.ask(body("garbage", number), 200)


@way
async def version_over(case: House, number: int) -> None:
    await case.ask(body("version", number, exact_version=9), 409)


@way
async def aborted(case: House, number: int) -> None:
    turn = asyncio.ensure_future(case.ask(body("long", number, 4000), 409))
    await asyncio.sleep(0.01)
    names = json.dumps({"request_ids": [f"long-{number}"]}).encode()
    await case.ask(names, 200, path="/inference/v1/abort_requests")
    await turn


@way
async def aborted_in_a_stream(case: House, number: int) -> None:
    # 409 where nothing was streamed yet.
    asked = body("long", number, 4000, stream=True)
    turn = asyncio.ensure_future(case.ask(asked, 200, 409))
    await asyncio.sleep(0.01)
    names = json.dumps({"request_ids": [f"long-{number}"]}).encode()
    await case.ask(names, 200, path="/inference/v1/abort_requests")
    await turn


@way
async def session_finished(case: House, number: int) -> None:
    turn = asyncio.ensure_future(case.ask(body("long", number, 4000, session_id="s"), 409))
    await asyncio.sleep(0.01)
    await case.ask(b'{"session_id": "s"}', 200, path="/finish_session")
    await turn


@way
async def cancelled_before_it_began(case: House, number: int) -> None:
    turns = case.gateway._server._turns
    turns.open(TurnRequest(f"unbegun-{number}", [1, 100], Sampling(max_tokens=16)))
    assert turns.cancel(f"unbegun-{number}")
    await asyncio.sleep(0)


@way
async def resumed(case: House, number: int) -> None:
    asked = body("long", number, 64, stream=True)
    await case.ask(asked, HUNG_UP, hang_up_at=b"data: ")
    await case.ask(asked, 200)


@way
async def no_replica(case: House, number: int) -> None:
    case.set_table("")
    await case.ask(body("none", number), 503)


async def before_hedged(case: House) -> None:
    """Nothing is known of a, which says that it is fast; b's pace is known from a turn there."""
    case.set_table("b")
    await case.ask(body("known", 0), 200)
    case.set_table("ab", (1e6, 1e3))


async def hedged(case: House, number: int, *wanted: int, **how: Any) -> None:
    """A turn which begins on a; as soon as its pace is known it has a copy on b."""
    group = {"group_id": f"g{number}", "group_size": 1, "hedges": 1}
    asked = body("hedged", number, 24, **group, **how.pop("fields", {}))
    await case.ask(asked, *wanted, **how)


@way
async def hedged_and_the_copy_wins(case: House, number: int) -> None:
    case.paces[0].gap_s = 0.1
    await hedged(case, number, 200)


@way
async def hedged_and_the_copy_loses(case: House, number: int) -> None:
    case.paces[0].gap_s, case.paces[1].gap_s = 0.03, 0.3
    await hedged(case, number, 200)


@way
async def hedged_and_hung_up(case: House, number: int) -> None:
    case.paces[0].gap_s = case.paces[1].gap_s = 0.1
    await hedged(case, number, HUNG_UP, hang_up_after_s=0.4)


@way
async def hedged_and_late(case: House, number: int) -> None:
    case.paces[0].gap_s = case.paces[1].gap_s = 0.1
    await hedged(case, number, 504, fields={"timeout_s": 0.4})


@way
async def bad_input(case: House, number: int) -> None:
    await case.ask(body("bad", number, sampling={"temperature": -1}), 400)
    await case.ask(b"{", 400)


async def left_by(way: Way) -> Counter[str]:
    """Types of all objects that turns of this way leave in cycles."""
    settings = {"stall_s": 0.03, "version_wait_s": 0.05, "resume_grace_s": 0.05}
    settings |= SETTINGS.get(way.__name__.split("_")[0], {})
    async with house(**settings) as case:

        async def turns(first: int) -> None:
            if way.__name__.startswith("hedged"):
                await before_hedged(case)
            await asyncio.gather(*(way(case, first + k) for k in range(TURNS)))
            await until(lambda: not case.gateway.status().running)
            await asyncio.sleep(0.01)

        await turns(0)
        gc.collect()
        gc.disable()
        stats = case.gateway.stats
        hedges = stats.hedges
        try:
            await turns(TURNS)
            assert stats.hedges > hedges or not way.__name__.startswith("hedged")
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return Counter(type(each).__name__ for each in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


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
    # The loop that gateways run on: asyncio's own leaves a cycle for each of its connections.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        left = runner.run(asyncio.wait_for(left_by(WAYS[name]), HANG_S))
    assert not left


async def left_by_closing() -> Counter[str]:
    gc.collect()
    gc.disable()
    async with house(shutdown_s=0.01) as case:
        for stream in (False, True):
            asked = [body(f"long_{stream}", k, 4_000, stream=stream) for k in range(TURNS)]
            turns = [asyncio.ensure_future(case.ask(each, 200, 503)) for each in asked]
        await until(lambda: sum(case.gateway.status().live_turns.values()) == 2 * TURNS)
        closing = asyncio.ensure_future(case.gateway._server.close())
        await asyncio.gather(closing, *turns)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage)


def test_turns_that_a_closing_gateway_ends_leave_no_cycles() -> None:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert not runner.run(asyncio.wait_for(left_by_closing(), HANG_S))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()

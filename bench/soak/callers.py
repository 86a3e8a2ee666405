"""Callers that are busy all the time, and the ways in which a turn of theirs can end."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bench.load.caller import HUNG_UP, HttpAnswer, HttpCaller

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
TOKENS, LONG = 16, 100_000
# Names come again, as those of trajectories do: what is kept by name is bounded, and full early.
SESSIONS, GROUPS = 256, 256
# Turns of one request of the storm: asking must not cost more than timing out does.
STORM_SAMPLES = 4


class Asker:
    """One caller; `other` is the connection of requests beside its turns."""

    def __init__(self, url: str, dice: random.Random) -> None:
        self.turns, self.other, self.dice = HttpCaller(url), HttpCaller(url), dice

    def body(self, name: str, number: int, max_tokens: int = TOKENS, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
        """Return one request; `name` tells the engine how it ends."""
        dice = self.dice
        sampling = {"max_tokens": max_tokens, "logprobs": 0, **fields.pop("sampling", {})}
        asked = {
            "request_id": f"{name}-{number}",
            "session_id": f"s{dice.randrange(SESSIONS)}",
            "token_ids": [dice.randrange(90) for _ in range(32)],
            "sampling_params": sampling,
        }
        return json.dumps({**asked, **fields}).encode()

    async def ask(self, asked: bytes, **how: Any) -> HttpAnswer:  # noqa: ANN401 - as HttpCaller.ask
        return await self.turns.post(GENERATE, asked, **how)

    def close(self) -> None:
        self.turns.hang_up()
        self.other.hang_up()


@dataclass(frozen=True, slots=True)
class SoakWay:
    """One way: a `share` of all requests, in parts of the sum; any of `statuses` is right.

    One request is `turns` turns.
    """

    name: str
    share: float
    statuses: tuple[int, ...]
    go: Callable[[Asker, int], Awaitable[HttpAnswer]]
    turns: int = 1


def _plain(name: str, **fields: Any) -> Callable[[Asker, int], Awaitable[HttpAnswer]]:  # noqa: ANN401 - JSON
    async def go(asker: Asker, number: int) -> HttpAnswer:
        return await asker.ask(asker.body(name, number, **fields))

    return go


async def _late(asker: Asker, number: int) -> HttpAnswer:
    return await asker.ask(asker.body("late", number, LONG, timeout_s=0.005))


async def _late_samples(asker: Asker, number: int) -> HttpAnswer:
    many = {"n": STORM_SAMPLES}
    return await asker.ask(asker.body("late", number, LONG, timeout_s=0.005, sampling=many))


async def _late_stream(asker: Asker, number: int) -> HttpAnswer:
    return await asker.ask(asker.body("late", number, LONG, timeout_s=0.005, stream=True))


async def _hung_up(asker: Asker, number: int) -> HttpAnswer:
    return await asker.ask(asker.body("left", number, LONG), hang_up_after_s=0.005)


async def _hung_up_stream(asker: Asker, number: int) -> HttpAnswer:
    asked = asker.body("left", number, LONG, stream=True)
    return await asker.ask(asked, hang_up_at=b"data: ")


async def _resumed(asker: Asker, number: int) -> HttpAnswer:
    asked = asker.body("resumed", number, 64, stream=True)
    await asker.ask(asked, hang_up_at=b"data: ")
    return await asker.ask(asked)


async def _twice(asker: Asker, number: int) -> HttpAnswer:
    asked = asker.body("twice", number)
    await asker.ask(asked)
    return await asker.ask(asked)


async def _aborted(asker: Asker, number: int) -> HttpAnswer:
    turn = asyncio.ensure_future(asker.ask(asker.body("aborted", number, LONG)))
    names = json.dumps({"request_ids": [f"aborted-{number}"]}).encode()
    done: set[asyncio.Future[HttpAnswer]] = set()
    while not done:
        done, _ = await asyncio.wait({turn}, timeout=0.02)
        # Until it is known there: the other connection may be read first.
        await asker.other.post(ABORT, names)
    return turn.result()


async def _group(asker: Asker, number: int) -> HttpAnswer:
    group = {"group_id": f"g{number % GROUPS}", "group_size": 2, "hedges": 1}
    sampling = {"n": 2}
    return await asker.ask(asker.body("group", number, 64, sampling=sampling, **group))


WAYS = (
    SoakWay("whole", 36, (200,), _plain("whole")),
    SoakWay("streamed", 18, (200,), _plain("streamed", stream=True)),
    SoakWay("samples", 2, (200,), _plain("samples", sampling={"n": 3}), turns=3),
    SoakWay("group with copies", 1, (200,), _group, turns=2),
    SoakWay("asked again", 2, (200,), _twice),
    SoakWay("left and resumed", 1, (200,), _resumed),
    SoakWay("deadline", 12, (504,), _late),
    # 200 where tokens were streamed before.
    SoakWay("deadline, streamed", 6, (504, 200), _late_stream),
    SoakWay("caller hangs up", 8, (HUNG_UP,), _hung_up),
    SoakWay("caller hangs up, streamed", 6, (HUNG_UP,), _hung_up_stream),
    SoakWay("aborted", 2, (409,), _aborted),
    SoakWay("version never comes", 1, (409,), _plain("version", min_version=9)),
    SoakWay("bad input", 3, (400,), _plain("bad", sampling={"temperature": -1})),
    SoakWay("refused by replica", 1, (400,), _plain("refused")),
    # A replica that failed rests for half a second: more of these, and none were left.
    SoakWay("revoked by replica", 0.15, (200,), _plain("revoked")),
    SoakWay("revoked again and again", 0.05, (200,), _plain("revoked_again")),
    SoakWay("replica drains", 0.15, (200,), _plain("draining")),
    SoakWay("replica answers 500", 0.1, (200,), _plain("faulty")),
    SoakWay("replica dies", 0.1, (200,), _plain("dies")),
    SoakWay("replica talks nonsense", 0.1, (200,), _plain("garbage")),
    SoakWay("replica goes silent", 0.1, (200,), _plain("silent")),
    SoakWay("all replicas fail", 0.02, (503,), _plain("failing")),
)
# The storm's only way.
LATE = SoakWay("deadline", 1, (504,), _late_samples, turns=STORM_SAMPLES)

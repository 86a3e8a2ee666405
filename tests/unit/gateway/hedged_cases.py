"""A hedged group of two: its first member is on a slow replica when a fast one joins."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rose.gateway import Gateway
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import base_url, begin, entry, gateway_with, until
from tests.unit.gateway.wire_cases import VLLM, ask, tokens_of, vllm_body

TOKENS = 24
COUNT = list(range(101, 101 + TOKENS))
SLOW_S = 0.06


def member(name: str, **fields: Any) -> dict[str, Any]:
    group = {"group_id": "g", "group_size": 2, "hedges": 1}
    return vllm_body(TOKENS, request_id=name, **{**group, **fields})


class HedgedCase:
    """A gateway with a slow replica, which has member `a`; `fast` joins when `b` is to begin."""

    def __init__(
        self, gateway: Gateway, http: aiohttp.ClientSession, slow: StandInReplica, fast: Any
    ) -> None:
        self.gateway, self.http, self.slow, self.fast = gateway, http, slow, fast
        self.stats: Any = gateway.stats
        self.rows = {
            "slow": entry(slow, "own-slow", decode_tok_s=75.0),
            "fast": entry(fast, "own-fast", decode_tok_s=1_000.0),
        }

    def table(self, *names: str) -> None:
        """Leave only the rows named in the gateway's table."""
        self.gateway.set_table(tuple(self.rows[name] for name in names))

    async def first(self, **fields: Any) -> "asyncio.Task[Any]":
        """Member a, of which some tokens came."""
        self.table("slow")
        turn = begin(self.http, member("a", **fields))
        await until(lambda: self.stats.tokens["own-slow"] >= 2)
        self.table("slow", "fast")
        return turn

    async def begun(self, **fields: Any) -> "asyncio.Task[Any]":
        """Member a after member b, which is whole: a copy of a is due."""
        turn = await self.first(**fields)
        fields.pop("timeout_s", None)
        status, answer, _ = await ask(self.http, VLLM, member("b", **fields))
        assert (status, tokens_of(answer)) == (200, COUNT)
        return turn

    async def over(self) -> None:
        """Wait until no copy of any turn runs."""
        await until(lambda: not any(self.gateway.status().live_turns.values()))


def segments_of(answer: Any) -> list[tuple[str, int, int]]:
    return [(s["replica"], s["start"], s["end"]) for s in answer["segments"]]


@asynccontextmanager
async def hedged_case(**settings: Any) -> AsyncIterator[HedgedCase]:
    async with (
        StandInReplica(version=1, delay_s=SLOW_S) as slow,
        StandInReplica(version=2, delay_s=0.002) as fast,
        gateway_with(stall_s=9, **settings) as gateway,
        aiohttp.ClientSession(base_url(gateway)) as http,
    ):
        yield HedgedCase(gateway, http, slow, fast)
        assert not any(gateway.status().live_turns.values())
        assert gateway.status().waiting == 0

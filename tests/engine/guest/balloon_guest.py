"""A real guest in fp32, its node, and what is asked of it while its KV memory moves."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from pool import Started
from standin_node import StandInNode
from tiny_model import VOCABULARY

from executor import GrantMode, GuestState

MIB = 1 << 20
MAX_TOKENS = 60


@dataclass
class Guest:
    engine: Started
    http: aiohttp.ClientSession

    @property
    def node(self) -> StandInNode:
        return self.engine.node

    def state(self) -> GuestState:
        state = self.engine.control.guest.read()
        assert state is not None
        return state

    def resident(self) -> int:
        """Resident bytes of the engine core, as the kernel counts them."""
        for line in Path(f"/proc/{self.engine.core.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                return int(line.split()[1]) << 10
        raise AssertionError("no Rss in smaps_rollup")

    async def settled_resident(self) -> int:
        """The same, once a ready engine has prepared for weights, which it does in a thread."""
        before, calm = self.resident(), 0
        async with asyncio.timeout(60):
            while calm < 8:
                await asyncio.sleep(0.25)
                now = self.resident()
                before, calm = now, calm + 1 if abs(now - before) < MIB else 0
        return before

    async def until(self, holds: Callable[[GuestState], bool], within_s: float = 10.0) -> float:
        """Wait; returns the seconds it took."""
        began_s = time.monotonic()
        while not holds(self.state()):
            assert time.monotonic() - began_s < within_s, self.state()
            await asyncio.sleep(0.0005)
        return time.monotonic() - began_s

    async def turn(self, tokens: list[int], max_tokens: int) -> tuple[list[int], str]:
        body = {
            "request_id": "turn",
            "token_ids": tokens,
            "sampling": {"temperature": 0.0, "max_tokens": max_tokens},
        }
        async with self.http.post(f"{self.engine.url}/rose/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            lines = [json.loads(line) async for line in answer.content]
        assert lines[-1]["finish_reason"] != "error", lines[-1]
        return [t for line in lines for t in line.get("token_ids", [])], lines[-1]["finish_reason"]

    async def trajectory(self, prompt: list[int]) -> tuple[list[int], int]:
        """Play a trajectory like a gateway: returned turns continue. Returns the moves."""
        output: list[int] = []
        for moves in range(200):
            more, reason = await self.turn(prompt + output, MAX_TOKENS - len(output))
            output += more
            if reason == "length":
                return output, moves
            assert reason == "abort"
            await asyncio.sleep(0.05)
        raise AssertionError("handed back without end")


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    shared = [rng.randrange(VOCABULARY) for _ in range(64)]
    return [
        (shared if rng.random() < 0.5 else [])
        + [rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 150))]
        for _ in range(count)
    ]


async def disturb(guest: Guest, rng: random.Random, seen: set[int]) -> None:
    """Change the grant without end; what the guest then holds is added to `seen`, in bytes."""
    modes = [GrantMode.RUN, GrantMode.RUN, GrantMode.RUN, GrantMode.FREEZE, GrantMode.THROTTLE]
    total = guest.state().granules_total
    while True:
        guest.node.mode = rng.choice(modes)
        guest.node.token_budget = rng.choice([4, 64, 2048])
        guest.node.kv_granule_cap = rng.choice([0, 1, 2, 4, 6, 8, 12, total // 2])
        await asyncio.sleep(rng.uniform(0.02, 0.25))
        seen.add(guest.state().bytes_mapped)


async def same_tokens_though_disturbed(guest: Guest, seed: int) -> tuple[int, int]:
    """Greedy output under a grant that changes all the time; returns turns and moves.

    A fast machine ends its turns before pages have gone; they are repeated until pages did.
    """
    rng = random.Random(seed)
    prompts = prompts_of(rng, 16)
    undisturbed = [(await guest.turn(prompt, MAX_TOKENS))[0] for prompt in prompts]
    seen: set[int] = set()
    turns = moves = 0
    disturbing = asyncio.create_task(disturb(guest, rng, seen))
    async with asyncio.timeout(240):
        while len(seen) <= 3:
            results = await asyncio.gather(*(guest.trajectory(prompt) for prompt in prompts))
            assert [output for output, _ in results] == undisturbed
            turns += len(prompts)
            moves += sum(moved for _, moved in results)
    disturbing.cancel()
    guest.node.mode, guest.node.kv_granule_cap = GrantMode.RUN, 0
    guest.node.token_budget = 2048
    return turns, moves

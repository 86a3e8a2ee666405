"""Routed sessions find their prefixes nearly as often as sessions that never move."""

import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest
from aiohttp import web

from elastic_scheduler import ReplicaKind
from rose.bench.gateway.real import (
    OUTPUT_TOKENS,
    AgentSession,
    Scale,
    made_up_sessions,
    read_sessions,
    replay,
)
from rose.bench.gateway.report import OF_ORACLE
from rose.client import RolloutClient, Sampling
from rose.errors import ConfigError
from rose.gateway import Gateway, GatewaySettings, StaticReplica

BLOCK = 16
REPLICAS = 3
SCALE = Scale(sessions=18, turns=10, max_prompt=400, think_s=0.02)
RECORDED = Path(os.environ.get("ROSE_AGENTIC_SESSIONS", "../shared/data/agentic_sessions.jsonl.gz"))


class PrefixCache:
    """Blocks of tokens by what came before them, the least used out first."""

    def __init__(self, blocks: int) -> None:
        self._blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._most = blocks
        self.asked = self.found = 0

    def take(self, tokens: list[int]) -> None:
        self.asked += len(tokens)
        hits = True
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            key = tuple(tokens[:end])
            hits = hits and key in self._blocks
            self.found += BLOCK * hits
            self._blocks[key] = None
            self._blocks.move_to_end(key)
            if len(self._blocks) > self._most:
                self._blocks.popitem(last=False)


class CachingReplica:
    """A replica without an engine that takes longer for what it has not cached."""

    def __init__(self, blocks: int) -> None:
        self.cache = PrefixCache(blocks)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/rose/v1/generate", self._generate)
        app.router.add_get("/rose/v1/state", self._state)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _state(self, http: web.Request) -> web.Response:
        return web.json_response({"policy_version": 0, "admitting": True, "kv_tokens": 0})

    async def _generate(self, http: web.Request) -> web.Response:
        asked = await http.json()
        before = self.cache.found
        self.cache.take(asked["token_ids"])
        uncached = len(asked["token_ids"]) - (self.cache.found - before)
        # Long beside what a busy machine needs for a turn: or one replica is always free.
        await asyncio.sleep(0.03 + uncached * 1e-4)
        count = asked["sampling"]["max_tokens"]
        line = {"token_ids": [1] * count, "logprobs": [-1.0] * count, "version": 0}
        body = f"{json.dumps(line)}\n{json.dumps({'finish_reason': 'length'})}\n"
        return web.Response(text=body, content_type="application/x-ndjson")


@asynccontextmanager
async def _routed(blocks: int) -> AsyncIterator[tuple[list[CachingReplica], RolloutClient]]:
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(CachingReplica(blocks)) for _ in range(REPLICAS)
        ]
        rows = tuple(
            StaticReplica(f"r{k}", ReplicaKind.DEDICATED, replica.url, 64)
            for k, replica in enumerate(replicas)
        )
        gateway = await stack.enter_async_context(Gateway(GatewaySettings(0, replicas=rows)))
        url = f"http://127.0.0.1:{gateway.port}"
        yield replicas, await stack.enter_async_context(RolloutClient(url))


def _oracle(sessions: list[AgentSession], blocks: int) -> float:
    """Sessions spread evenly, none ever moves, turns in the order of their think times."""
    caches = [PrefixCache(blocks) for _ in range(REPLICAS)]
    due = []
    for number, session in enumerate(sessions):
        at_s = 0.0
        for turn in range(len(session.turns)):
            at_s += session.turns[turn].think_s
            due.append((at_s, number, turn))
    for _, number, turn in sorted(due):
        caches[number % REPLICAS].take(sessions[number].prompt(turn))
    return sum(cache.found for cache in caches) / sum(cache.asked for cache in caches)


async def _hit_rate(sessions: list[AgentSession], blocks: int) -> float:
    async with _routed(blocks) as (replicas, client):

        async def ask(session: str, turn: int, prompt: list[int]) -> None:
            await client.generate(prompt, Sampling(max_tokens=OUTPUT_TOKENS), session_id=session)

        turns = await replay(sessions, ask)
        assert turns == sum(len(session.turns) for session in sessions)
    asked = sum(replica.cache.asked for replica in replicas)
    assert all(replica.cache.asked > asked / 10 for replica in replicas), "all share the work"
    return sum(replica.cache.found for replica in replicas) / asked


def _blocks(sessions: list[AgentSession]) -> int:
    """Room for twice a replica's share: how long a session gets, no router knows."""
    longest = sum(session.turns[-1].prompt_tokens for session in sessions)
    return int(2 * longest / BLOCK / REPLICAS)


@pytest.mark.parametrize("seed", range(3))
async def test_made_up_sessions_keep_their_prefixes(seed: int) -> None:
    sessions = made_up_sessions(SCALE, seed)
    oracle = _oracle(sessions, _blocks(sessions))
    assert oracle > 0.5, "or there was nothing to keep"
    assert await _hit_rate(sessions, _blocks(sessions)) >= OF_ORACLE * oracle


@pytest.mark.skipif(
    not RECORDED.exists(), reason="no recorded sessions: name a file in ROSE_AGENTIC_SESSIONS"
)
async def test_recorded_sessions_keep_their_prefixes() -> None:
    sessions = read_sessions(RECORDED, SCALE)
    oracle = _oracle(sessions, _blocks(sessions))
    assert oracle > 0.5
    assert await _hit_rate(sessions, _blocks(sessions)) >= OF_ORACLE * oracle


async def test_turns_without_a_session_show_that_the_test_can_fail() -> None:
    sessions = made_up_sessions(SCALE)
    blocks = _blocks(sessions)
    async with _routed(blocks) as (replicas, client):

        async def ask(session: str, turn: int, prompt: list[int]) -> None:
            await client.generate(prompt, Sampling(max_tokens=OUTPUT_TOKENS))

        await replay(sessions, ask)
    asked = sum(replica.cache.asked for replica in replicas)
    found = sum(replica.cache.found for replica in replicas)
    assert found / asked < OF_ORACLE * _oracle(sessions, blocks)


def test_prompts_grow_by_their_own_tokens_and_scales_hold(tmp_path: Path) -> None:
    sessions = made_up_sessions(SCALE)
    assert len(sessions) == SCALE.sessions
    for session in sessions:
        prompts = [session.prompt(turn) for turn in range(len(session.turns))]
        assert all(b[: len(a)] == a for a, b in pairwise(prompts))
        assert max(map(len, prompts)) <= SCALE.max_prompt
    file = tmp_path / "sessions.jsonl"
    file.write_text(
        '{"id": "1", "turns": [[0, 1000, 5, 0, 1], [3, 2000, 5, 2, 1], [9, 4000, 5, 2, 1]]}\n'
    )
    (only,) = read_sessions(file, SCALE)
    assert [turn.prompt_tokens for turn in only.turns] == [100, 200, 400]
    file.write_text("nothing\n")
    with pytest.raises(ConfigError, match="holds no sessions"):
        read_sessions(file, SCALE)

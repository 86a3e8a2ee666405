"""Routed sessions find their prefixes nearly as often as sessions that never move."""

import asyncio
import os
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path

import pytest

from bench.gateway import (
    OF_ORACLE,
    OUTPUT_TOKENS,
    AgentSession,
    Scale,
    made_up_sessions,
    read_sessions,
    replay,
)
from elastic_scheduler import End, ReplicaKind
from rose.errors import ConfigError
from rose.gateway import GatewaySettings, ReplicaEntry
from rose.gateway.replicas.dispatcher import Dispatcher
from rose.gateway.stats import GatewayStats
from rose.gateway.turn_request import Origin, Sampling, TurnRequest
from tests.unit.client.virtual_time import run_virtually

SESSION = "{session}"
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


async def _serve(cache: PrefixCache, prompt: list[int]) -> None:
    """A turn on a replica without an engine that takes longer for what it has not cached."""
    before = cache.found
    cache.take(prompt)
    uncached = len(prompt) - (cache.found - before)
    await asyncio.sleep(0.03 + uncached * 1e-4)


class Fleet:
    """Replicas behind the gateway's dispatcher: its queue and its routing, without sockets."""

    def __init__(self, blocks: int, names: str) -> None:
        """`names`: a session's name as its caller gives it with each turn."""
        self._names = names
        self.caches = {f"r{number}": PrefixCache(blocks) for number in range(REPLICAS)}
        self._dispatcher = Dispatcher(
            GatewaySettings(0, scheduler="127.0.0.1:1"),
            GatewayStats(),
            asyncio.get_running_loop().time,
            lambda kind, **fields: None,
        )
        self._dispatcher.set_table(tuple(map(_row, self.caches)))

    async def ask(self, session: str, turn: int, prompt: list[int]) -> None:
        """One turn as the gateway has it: placed, answered, over."""
        sampling = Sampling(max_tokens=OUTPUT_TOKENS)
        origin = Origin(self._names.format(session=session, turn=turn))
        request = TurnRequest(f"{session}.{turn}", prompt, sampling, origin)
        place = await self._dispatcher.acquire(request.need())
        await _serve(self.caches[place.entry.id], prompt)
        self._dispatcher.journaled(place, OUTPUT_TOKENS)
        self._dispatcher.finish(place, End.FINISHED)

    def hit_rate(self) -> float:
        """Cached tokens among those of all prompts."""
        caches = self.caches.values()
        return sum(cache.found for cache in caches) / sum(cache.asked for cache in caches)


def _row(name: str) -> ReplicaEntry:
    return ReplicaEntry(name, ReplicaKind.DEDICATED, "", True, 0, True, 0, 64)


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


def _of_oracle(sessions: list[AgentSession], names: str = SESSION) -> float:
    """Return the hit rate of sessions replayed side by side, by a clock of their own, over the
    oracle's.
    """
    # Room for twice a replica's share: how long a session gets, no router knows.
    blocks = int(2 * sum(s.turns[-1].prompt_tokens for s in sessions) / BLOCK / REPLICAS)

    async def replayed() -> float:
        fleet = Fleet(blocks, names)
        turns = await replay(sessions, fleet.ask)
        assert turns == sum(len(session.turns) for session in sessions)
        asked = [cache.asked for cache in fleet.caches.values()]
        assert min(asked) > sum(asked) / 10, "all share the work"
        return fleet.hit_rate()

    oracle = _oracle(sessions, blocks)
    assert oracle > 0.5, "or there was nothing to keep"
    return run_virtually(replayed()) / oracle


@pytest.mark.parametrize(
    ("seed", "names", "kept"),
    [
        *((seed, SESSION, True) for seed in range(3)),
        (0, "", True),
        (0, "{session}.{turn}", False),
    ],
    ids=["first", "second", "third", "without a name", "a name for each turn"],
)
def test_made_up_sessions_keep_their_prefixes(seed: int, names: str, kept: bool) -> None:
    assert (_of_oracle(made_up_sessions(SCALE, seed), names) >= OF_ORACLE) is kept


@pytest.mark.skipif(
    not RECORDED.exists(), reason="no recorded sessions: name a file in ROSE_AGENTIC_SESSIONS"
)
def test_recorded_sessions_keep_their_prefixes() -> None:
    assert _of_oracle(read_sessions(RECORDED, SCALE)) >= OF_ORACLE


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

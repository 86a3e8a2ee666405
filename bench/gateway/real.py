"""Cells and sessions over real, stock vLLM with a tiny model: two engines, one gateway.

Without stamps in the chunks a router's share is a difference of times that are mostly the engine's,
so these rows say that it works and what it costs roughly; exact figures are the stand-in's.

Agentic sessions are replayed small there, turns whose prompts grow from turn to turn. A file, gzip
or plain, has one session a line: `{"turns": [[start_s, input_tokens, output_tokens, think_s,
api_s], …]}`; without one, sessions of the same shape are made up. Prompts are cut to `max_prompt`
tokens by one factor for all, think times to `think_s` in the middle by another.
"""

import asyncio
import gzip
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from bench.chaos.fleet import ChaosFleet
from bench.common.processes import cores
from bench.gateway.rounds import Say, cell_of
from bench.load.streams import Generator, StreamLoad
from bench.load.wires import REAL_TEXT, REAL_TOKENS
from rose.client import RolloutClient, Sampling
from rose.engines import EngineRole
from rose.errors import ConfigError

VOCABULARY = 96
OUTPUT_TOKENS = 4

Ask = Callable[[str, int, list[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A prompt's length in tokens, and the pause before it in seconds."""

    prompt_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One trajectory."""

    id: str
    turns: tuple[SessionTurn, ...]

    def prompt(self, turn: int) -> list[int]:
        """Return the session's tokens up to this turn, with which its next prompt begins."""
        dice = random.Random(self.id)  # noqa: S311 - the same tokens whoever asks
        return [dice.randrange(VOCABULARY) for _ in range(self.turns[turn].prompt_tokens)]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the replay."""

    sessions: int = 24
    turns: int = 12
    max_prompt: int = 400
    think_s: float = 0.05


def read_sessions(path: Path, scale: Scale) -> list[AgentSession]:
    """Return the first sessions of a file with at least three turns. Raises ConfigError."""
    opened = gzip.open if path.suffix == ".gz" else open
    rows: list[list[tuple[int, float]]] = []
    try:
        with opened(path, "rt") as lines:
            for line in lines:
                turns = [(int(turn[1]), float(turn[3])) for turn in json.loads(line)["turns"]]
                if len(turns) >= 3:
                    rows.append(turns[: scale.turns])
                if len(rows) == scale.sessions:
                    break
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path} holds no sessions: {error}") from error
    return _scaled(rows, scale)


def made_up_sessions(scale: Scale, seed: int = 0) -> list[AgentSession]:
    """Return sessions whose prompts grow turn by turn, with long-tailed think times."""
    dice = random.Random(seed)  # noqa: S311 - repeatable
    rows = []
    for _ in range(scale.sessions):
        length, turns = dice.randint(15_000, 60_000), []
        for _ in range(dice.randint(3, scale.turns)):
            turns.append((length, dice.lognormvariate(2.3, 0.8)))
            length += dice.randint(300, 8_000)
        rows.append(turns)
    return _scaled(rows, scale)


def _scaled(rows: Sequence[Sequence[tuple[int, float]]], scale: Scale) -> list[AgentSession]:
    longest = max(tokens for turns in rows for tokens, _ in turns)
    thinks = sorted(think for turns in rows for _, think in turns)
    middle_s = max(thinks[len(thinks) // 2], 1e-3)
    return [
        AgentSession(
            f"agent-{number}",
            tuple(
                SessionTurn(
                    max(8, tokens * scale.max_prompt // longest),
                    min(4.0, think / middle_s) * scale.think_s,
                )
                for tokens, think in turns
            ),
        )
        for number, turns in enumerate(rows)
    ]


async def replay(sessions: Sequence[AgentSession], ask: Ask) -> int:
    """Play all sessions side by side, each turn after its think time; return the turns."""

    async def one(session: AgentSession) -> int:
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think_s)
            await ask(session.id, number, session.prompt(number))
        return len(session.turns)

    return sum(await asyncio.gather(*map(one, sessions)))


STREAMS = (1, 10, 50)
# vLLM's own counters, in tokens; only stock engines have them: replicas leave their upkeep out.
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


async def over_real_engines(
    folder: Path,
    sessions: Mapping[str, Sequence[AgentSession]],
    rounds: int,
    seconds: float,
    say: Say,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return cells and rows of sessions; `folder` has the model in `model`."""
    say("starting two real engines")
    async with ChaosFleet(
        folder, folder / "model", 2, gateways_count=1, role=EngineRole.STOCK
    ) as fleet:
        log = folder / "gateway-generator.log"
        with Generator.of(log, cores()["generator"]) as generator:
            cells = await asyncio.to_thread(_cells, fleet, generator, rounds, seconds, say)
        rows = []
        for name, some in sessions.items():
            say(f"sessions, {name}")
            rows.append(await _session_row(fleet, name, some))
    return cells, rows


def _cells(
    fleet: ChaosFleet, generator: Generator, rounds: int, seconds: float, say: Say
) -> list[dict[str, Any]]:
    direct = [replica.spec.url for replica in fleet.replicas]
    gateway = fleet.gateways[0]
    ways = (("direct", REAL_TEXT, direct), ("rose", REAL_TOKENS, fleet.urls))
    cells: list[dict[str, Any]] = []
    for number in range(-1, rounds):
        for streams in STREAMS:
            for router, wire, urls in ways:
                load = StreamLoad(streams, seconds, prompt_tokens=64, chunks=16, chunk_tokens=4)
                before, began_s = gateway.cpu_use(), time.monotonic()
                measured = generator.cell(urls, wire.name, load, len(cells))
                took_s = time.monotonic() - began_s
                if number < 0:
                    continue  # The first steps of an engine take seconds.
                say(f"{streams} streams, vllm, {router}, {number}")
                names = {
                    "engine": "vllm",
                    "router": router,
                    "wire": wire.name,
                    "baseline": REAL_TEXT.name,
                    "round": number,
                    "due_turns_per_s": None,
                }
                used = {"router": gateway.cpu_use().share_since(before, took_s)}
                cells.append(cell_of(names, load, used) | dict(measured))
    return cells


async def _session_row(
    fleet: ChaosFleet, name: str, sessions: Sequence[AgentSession]
) -> dict[str, Any]:
    """Return hit rates of routed sessions, and of the same ones when each stays where it is put.

    Other ids are other tokens: what one run leaves in the caches is of no use to the next.
    """
    sessions = [replace(session, id=f"{name}, {session.id}") for session in sessions]
    async with RolloutClient(fleet.urls) as client:

        async def routed(session: str, turn: int, prompt: list[int]) -> None:
            sampling = Sampling(max_tokens=OUTPUT_TOKENS)
            await client.generate(
                prompt, sampling, request_id=f"{session}/{turn}", session_id=session
            )

        before = await _counters(fleet)
        turns = await replay(sessions, routed)
        between = await _counters(fleet)
    pinned = [replace(session, id=f"pinned-{session.id}") for session in sessions]
    home = {session.id: k % len(fleet.replicas) for k, session in enumerate(pinned)}

    async def stay(session: str, turn: int, prompt: list[int]) -> None:
        body = {"request_id": f"{session}/{turn}", "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
        url = f"{fleet.replicas[home[session]].spec.url}{REAL_TEXT.path}"
        async with fleet.http.post(url, json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    await replay(pinned, stay)
    after = await _counters(fleet)
    mine, oracle = _rate(before, between), _rate(between, after)
    return {
        "engine": f"vllm, {name}",
        "sessions": len(sessions),
        "turns": turns,
        "routed_hit_rate": mine,
        "oracle_hit_rate": oracle,
        "of_oracle": mine / oracle if oracle else 0.0,
    }


async def _counters(fleet: ChaosFleet) -> tuple[float, float]:
    """Return tokens looked up and found in all prefix caches so far."""
    asked = found = 0.0
    for replica in fleet.replicas:
        async with fleet.http.get(f"{replica.spec.url}/metrics") as answer:
            text = await answer.text()
        asked, found = asked + _sum(text, QUERIES), found + _sum(text, HITS)
    return asked, found


def _sum(text: str, name: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    if not lines:
        raise aiohttp.ClientPayloadError(f"the engine's /metrics has no {name}")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _rate(before: tuple[float, float], after: tuple[float, float]) -> float:
    asked = after[0] - before[0]
    return (after[1] - before[1]) / asked if asked else 0.0

"""A trainer that always has so many turns in flight, and looks hard at each answer."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rose.bench.chaos.model import VOCABULARY
from rose.client import RolloutClient, RolloutError, Sampling, Turn

PROMPTS = 24
OUTPUT_TOKENS = 300
FEWEST_TOKENS = 100
FAULTS_TOLD = 5


def prompts() -> list[list[int]]:
    """Different ones of different lengths."""
    return [[(7 * k + 5 * p + 3) % VOCABULARY for k in range(40 + p)] for p in range(PROMPTS)]


def greedy(tokens: int) -> Sampling:
    """So that every turn is known beforehand."""
    return Sampling(temperature=0.0, max_tokens=tokens)


async def undisturbed(client: RolloutClient) -> list[Turn]:
    """The turns as they have to be: the longest answer to every prompt."""
    whole = greedy(OUTPUT_TOKENS)
    turns = [client.generate(p, whole, request_id=f"plain-{k}") for k, p in enumerate(prompts())]
    return await asyncio.gather(*turns)


@dataclass
class Findings:
    """What became of the turns; every count but the first three has to be zero."""

    asked: int = 0
    delivered: int = 0
    moved: int = 0
    lost: int = 0
    doubled: int = 0
    wrong_tokens: int = 0
    unstamped: int = 0
    gaps: int = 0
    told: list[str] = field(default_factory=list)
    _ids: Counter[str] = field(default_factory=Counter)

    def tell(self, what: str) -> None:
        """Keep the first few in words."""
        if len(self.told) < FAULTS_TOLD:
            self.told.append(what)

    def look_at(self, turn: Turn, expected: Turn, tokens: int) -> None:
        """Count one delivered turn and what is wrong with it."""
        self.delivered += 1
        self.moved += len(turn.segments) > 1 or turn.attempts > 1
        self._ids[turn.request_id] += 1
        self.doubled += self._ids[turn.request_id] > 1
        if turn.token_ids != expected.token_ids[:tokens] or len(turn.logprobs) != tokens:
            self.wrong_tokens += 1
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(
                        zip(turn.token_ids, expected.token_ids, strict=False)
                    )
                    if a != b
                ),
                min(len(turn.token_ids), tokens),
            )
            self.tell(
                f"{turn.request_id}: {len(turn.token_ids)} of {tokens} tokens, the first other one"
                f" at {at}; {turn.segments}"
            )
        self.gaps += not _covers([s[2:] for s in turn.segments], tokens)
        stamped = [(a, b) for version, a, b in turn.versions if version >= 0]
        if not _covers(stamped, tokens):
            self.unstamped += 1
            self.tell(f"{turn.request_id}: stamps {turn.versions}")

    @property
    def faults(self) -> int:
        """All that must not be."""
        return self.lost + self.doubled + self.wrong_tokens + self.unstamped + self.gaps


def _covers(spans: Sequence[tuple[int, int]], tokens: int) -> bool:
    at = 0
    for start, end in spans:
        if start != at or end <= start:
            return False
        at = end
    return at == tokens


@dataclass
class Trainer:
    """Half of its turns are streamed, half come whole."""

    client: RolloutClient
    expected: Sequence[Turn]
    seed: int
    findings: Findings = field(default_factory=Findings)

    async def run(self, in_flight: int, until_s: float) -> None:
        """Begin turns until `until_s`, then wait for all of them."""
        ids = itertools.count()
        await asyncio.gather(*(self._worker(k, ids, until_s) for k in range(in_flight)))

    async def _worker(self, number: int, ids: "itertools.count[int]", until_s: float) -> None:
        dice = random.Random(self.seed * 1_000 + number)  # noqa: S311 - repeatable
        while time.monotonic() < until_s:
            which, tokens = dice.randrange(PROMPTS), dice.randint(FEWEST_TOKENS, OUTPUT_TOKENS)
            name = f"chaos-{next(ids)}"
            self.findings.asked += 1
            try:
                turn = await self._turn(name, which, tokens, streamed=dice.random() < 0.5)
            except RolloutError as error:
                self.findings.lost += 1
                self.findings.tell(f"{name}: {type(error).__name__}: {error}")
                continue
            self.findings.look_at(turn, self.expected[which], tokens)

    async def _turn(self, name: str, which: int, tokens: int, *, streamed: bool) -> Turn:
        prompt, sampling = prompts()[which], greedy(tokens)
        if not streamed:
            return await self.client.generate(prompt, sampling, request_id=name, session_id=name)
        got: list[int] = []
        async with self.client.stream(prompt, sampling, request_id=name, session_id=name) as stream:
            async for chunk in stream:
                got += chunk.token_ids
        if tuple(got) != stream.turn.token_ids:
            self.findings.doubled += 1
            self.findings.tell(f"{name}: the chunks are not the turn")
        return stream.turn

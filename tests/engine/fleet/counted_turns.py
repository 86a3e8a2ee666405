"""CountedTurns: a client with turns in flight all the time, which looks hard at each answer."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rose.client import Retry, RolloutClient, Sampling, Turn
from tests.harness.waiting import PATIENCE_S

IN_FLIGHT = 16
OUTPUT_TOKENS = 80
# A gateway may be gone for as long as the suite is patient.
RETRY = Retry(tries=60, first_s=0.05, max_s=1.0)


@dataclass
class CountedTurns:
    """Turns by their ids. Each is asked for once, and has to come whole, and once."""

    client: RolloutClient
    asked: int = 0
    done: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    versions: set[int] = field(default_factory=set)

    async def user(self, number: int, ended: asyncio.Event) -> None:
        """One turn after the other; every second one as a stream."""
        for k in itertools.count():
            if ended.is_set():
                return
            prompt, name = [number + 1, 1_000 * (number + 1) + k], f"turn-{number}-{k}"
            sampling = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS)
            self.asked += 1
            if k % 2:
                async with self.client.stream(prompt, sampling, request_id=name) as stream:
                    async for _ in stream:
                        pass
                turn = stream.turn
            else:
                turn = await self.client.generate(prompt, sampling, request_id=name)
            self._look_at(turn, prompt)

    async def more(self, count: int) -> None:
        """Wait until so many turns more are done than now."""
        wanted = self.done.total() + count
        async with asyncio.timeout(PATIENCE_S):
            while self.done.total() < wanted:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)

    async def settled(self) -> None:
        """Wait until each turn that is in flight now has come whole."""
        flying = {row.request_id for row in self.client.progress().running}
        async with asyncio.timeout(PATIENCE_S):
            while not flying <= self.done.keys():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)

    def _look_at(self, turn: Turn, prompt: Sequence[int]) -> None:
        first = prompt[-1] + 1
        expected = (*range(first, first + OUTPUT_TOKENS),)
        assert turn.token_ids == expected, f"{turn.request_id} is no unbroken count: {turn}"
        assert turn.logprobs == tuple(-token / 1000 for token in expected)
        # Tokens that came before a gateway died have a version, but no replica.
        spans = [(start, end) for _, start, end in turn.versions]
        assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), OUTPUT_TOKENS]
        self.versions |= {version for version, _, _ in turn.versions}
        assert all(version >= 0 for version in self.versions), turn
        self.moved += len(turn.segments) > 1 or turn.attempts > 1
        self.done[turn.request_id] += 1


@asynccontextmanager
async def counted_turns(
    urls: Sequence[str], in_flight: int = IN_FLIGHT
) -> AsyncIterator[CountedTurns]:
    """Keep `count` turns in flight until the end, when all of them have come whole."""
    async with RolloutClient(urls, 4 * PATIENCE_S, retry=RETRY) as client:
        turns, ended = CountedTurns(client), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(in_flight):
                group.create_task(turns.user(number, ended))
            try:
                yield turns
            finally:
                ended.set()
        assert turns.done.total() == turns.asked == len(turns.done), "each once, none lost"

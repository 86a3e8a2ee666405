"""The gateway over two real replicas in fp32: a turn that moves is the turn that stayed."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from engine_specs import LEFT, RIGHT
from live_fleet import fleet_of
from pool import Started
from tiny_model import VOCABULARY

from bench.chaos import ChaosFleet, ChaosReplica
from elastic_scheduler import ReplicaKind
from rose.client import RolloutClient, Sampling, Turn
from rose.gateway import Gateway, GatewaySettings, StaticReplica
from rose.gateway.replicas import static

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(LEFT, RIGHT, spends=True),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

PATIENCE_S = 20.0
# By then the gateway has forgotten how slow the first batch was.
SETTLE_S = 2.0
TURNS = 8
OUTPUT_TOKENS = 400
MIDDLE_TOKENS = 60
PROMPTS = [[(7 * k + 5 * turn + 3) % VOCABULARY for k in range(50 + turn)] for turn in range(TURNS)]
GREEDY = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS)


@dataclass
class EngineStage:
    """Two replicas, and a gateway of this process before them."""

    fleet: ChaosFleet
    url: str
    expected: list[Turn] = field(default_factory=list)

    async def turns(self, label: str) -> list[Turn]:
        """All prompts at once."""
        async with RolloutClient(self.url, timeout_s=120) as client:
            return await asyncio.gather(
                *(
                    client.generate(
                        prompt, GREEDY, request_id=f"{label}-{k}", session_id=f"{label}-{k}"
                    )
                    for k, prompt in enumerate(PROMPTS)
                )
            )

    async def stats(self) -> dict[str, Any]:
        async with self.fleet.http.get(f"{self.url}/rose/v1/stats") as answer:
            return dict(await answer.json())

    async def ready(self, replicas: int) -> None:
        """Wait until the gateway sends turns to so many replicas."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with self.fleet.http.get(f"{self.url}/health") as answer:
                    if (await answer.json())["replicas"] == replicas:
                        return
                await asyncio.sleep(0.05)

    async def in_the_middle(self) -> ChaosReplica:
        """The replica with most turns, once it has made `MIDDLE_TOKENS` more for them."""
        before = (await self.stats())["tokens"]
        by_name = {replica.spec.name: replica for replica in self.fleet.replicas}
        async with asyncio.timeout(PATIENCE_S):
            while True:
                stats = await self.stats()
                live = stats["live_turns"]
                name = max(live, key=live.__getitem__)
                made = stats["tokens"].get(name, 0) - before.get(name, 0)
                if live[name] and made >= MIDDLE_TOKENS:
                    return by_name[name]
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(
    engines: list[Started], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineStage]:
    rows = tuple(
        StaticReplica(engine.spec.name, ReplicaKind.DEDICATED, engine.url, 32) for engine in engines
    )
    settings = GatewaySettings(port=0, replicas=rows, max_attempts=24)
    folder = tmp_path_factory.mktemp("gateway")
    with pytest.MonkeyPatch.context() as patch:
        # Else half of each turn would pass before the gateway sees a replica come back.
        patch.setattr(static, "POLL_S", 0.05)
        async with (
            fleet_of(engines, folder, gateways_count=0) as fleet,
            Gateway(settings) as gateway,
        ):
            stage = EngineStage(fleet, f"http://127.0.0.1:{gateway.port}")
            await stage.ready(2)
            # The first batch of an engine takes seconds: long enough to count as stalled.
            await stage.turns("warm-up")
            await asyncio.sleep(SETTLE_S)
            stage.expected = await stage.turns("undisturbed")
            yield stage


def assert_same(turns: list[Turn], expected: list[Turn]) -> None:
    """Same tokens, logprobs as near as recomputing them leaves them, every token accounted for."""
    for turn, plain in zip(turns, expected, strict=True):
        assert turn.token_ids == plain.token_ids
        assert turn.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
        assert turn.versions == ((0, 0, OUTPUT_TOKENS),)
        assert (turn.segments[0][2], turn.segments[-1][3]) == (0, OUTPUT_TOKENS)
        assert all(a[3] == b[2] for a, b in pairwise(turn.segments))
        assert turn.finish_reason == "length"


async def test_undisturbed_turns_are_whole_and_use_both_replicas(stage: EngineStage) -> None:
    assert [turn.attempts for turn in stage.expected] == [1] * TURNS
    assert all(len(turn.token_ids) == OUTPUT_TOKENS for turn in stage.expected)
    # A degenerate model would make all the other tests empty.
    assert all(len(set(turn.token_ids[-100:])) > 8 for turn in stage.expected)
    assert {turn.segments[0][0] for turn in stage.expected} == {LEFT.name, RIGHT.name}


async def test_drains_in_the_middle_of_turns_change_no_token(stage: EngineStage) -> None:
    running = asyncio.create_task(stage.turns("drained"))
    aborted = []
    for _ in range(3):
        replica = await stage.in_the_middle()
        aborted.append(await replica.drain())
        await stage.ready(1)
        await replica.admit()
        await stage.ready(2)
    turns = await running
    assert all(aborted), "every drain hit running turns"
    assert max(turn.attempts for turn in turns) >= 3
    assert any(len({segment[0] for segment in turn.segments}) == 2 for turn in turns)
    assert_same(turns, stage.expected)


async def test_a_replica_that_hangs_loses_its_turns_to_the_other(stage: EngineStage) -> None:
    running = asyncio.create_task(stage.turns("hung"))
    replica = await stage.in_the_middle()
    replica.signal(signal.SIGSTOP)
    try:
        turns = await running
    finally:
        replica.signal(signal.SIGCONT)
    assert any(turn.attempts > 1 for turn in turns)
    assert replica.spec.name not in {turn.segments[-1][0] for turn in turns}
    assert_same(turns, stage.expected)


async def test_a_killed_replica_loses_no_token(stage: EngineStage, engines: list[Started]) -> None:
    await stage.ready(2)
    running = asyncio.create_task(stage.turns("killed"))
    replica = await stage.in_the_middle()
    (killed,) = (engine for engine in engines if engine.spec == replica.spec)
    killed.spend("it is killed")
    replica.signal(signal.SIGKILL)
    turns = await running
    assert any(turn.attempts > 1 for turn in turns)
    assert_same(turns, stage.expected)
    stats = await stage.stats()
    assert stats["failed"] == 0
    assert stats["turns"] == 5 * TURNS

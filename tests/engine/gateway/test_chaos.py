"""Turns in flight while their replicas are killed, frozen and revoked, and gateways killed.

The same at full length: `make chaos`.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_specs import LEFT, RIGHT
from live_fleet import fleet_of
from pool import Started

from bench.chaos import ChaosFleet, chaos, prompts
from bench.common.tiny_models import FLEET_MODEL
from rose.client import RolloutClient, Sampling, Turn

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(LEFT, RIGHT),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

SECONDS, IN_FLIGHT = 30.0, 200
OUTPUT_TOKENS = 400
MOST_REVOCATIONS = 10
PATIENCE_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    engines: list[Started], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ChaosFleet]:
    async with fleet_of(engines, tmp_path_factory.mktemp("chaos")) as fleet:
        yield fleet


async def _usable(fleet: ChaosFleet, replicas: int) -> None:
    """Wait until the first gateway sends turns to so many."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with fleet.http.get(f"{fleet.urls[0]}/health") as answer:
                if (await answer.json())["replicas"] == replicas:
                    return
            await asyncio.sleep(0.02)


async def _working(fleet: ChaosFleet) -> str:
    """The replica that has a turn now."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with fleet.http.get(f"{fleet.urls[0]}/rose/v1/stats") as answer:
                live = (await answer.json())["live_turns"]
            for name, turns in live.items():
                if turns:
                    return str(name)
            await asyncio.sleep(0.005)


async def _revoked(fleet: ChaosFleet, client: RolloutClient, times: int) -> Turn:
    """One turn whose replica is revoked so often, at even distances."""
    step, done = OUTPUT_TOKENS // (times + 1), 0
    by_name = {replica.spec.name: replica for replica in fleet.replicas}
    sampling = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    async with client.stream(prompts()[0], sampling, request_id=f"revoked-{times}") as stream:
        async for chunk in stream:
            if done < times and chunk.start >= (done + 1) * step:
                replica = by_name[await _working(fleet)]
                await replica.drain()
                await replica.admit()
                done += 1
    assert done == times
    return stream.turn


async def test_greedy_output_after_k_revocations_is_the_uninterrupted_output(
    fleet: ChaosFleet,
) -> None:
    await _usable(fleet, 2)
    async with RolloutClient(fleet.urls[0]) as client:
        plain = await _revoked(fleet, client, 0)
        assert len(set(plain.token_ids[-100:])) > 8, "a degenerate model would prove nothing"
        for times in range(1, MOST_REVOCATIONS + 1):
            turn = await _revoked(fleet, client, times)
            assert turn.token_ids == plain.token_ids, f"after {times} revocations"
            assert turn.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
            assert turn.versions == ((0, 0, OUTPUT_TOKENS),)
            assert turn.attempts > times, "each revocation hit it"
            # One more where a busy machine let a replica count as stalled.
            assert len(turn.segments) >= times + 1


@pytest.mark.nightly
async def test_no_turn_is_lost_doubled_or_unstamped_whatever_is_killed(tmp_path: Path) -> None:
    """With engines of its own: they are killed, and started anew."""
    FLEET_MODEL.save(tmp_path / "model")
    async with ChaosFleet(tmp_path, tmp_path / "model", 2) as fleet:
        await _usable(fleet, 2)
        found: dict[str, Any] = await chaos(fleet, SECONDS, IN_FLIGHT, seed=0)
    assert found["notes"] == []
    assert found["faults_found"] == 0
    assert found["delivered"] == found["asked"] > IN_FLIGHT
    assert found["moved"] > IN_FLIGHT / 4, "the faults hit turns"
    assert set(found["faults_done"]) >= {"revoke", "freeze", "kill"}

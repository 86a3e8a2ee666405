"""Trajectories start in order, never too old, and every one that starts is accounted for."""

import asyncio
from functools import partial

from bench.demo.frozen_lake.task import training_lake
from bench.demo.training.rollouts import RolloutPlan, Rollouts, sampling
from tests.fakes.policy import StandInSource


def _plan(batches: int = 3, streams: int = 4) -> RolloutPlan:
    return RolloutPlan(
        batches=batches,
        groups=2,
        group_size=2,
        streams=streams,
        max_staleness=1,
        how=sampling(long_turns=False),
        lake_of=partial(training_lake, 0),
    )


async def test_a_batch_waits_for_the_version_that_its_staleness_needs() -> None:
    rollouts = Rollouts(StandInSource(), _plan())
    starting = asyncio.create_task(rollouts.run())
    await rollouts.batch(0)
    await rollouts.batch(1)
    await asyncio.sleep(0.02)
    assert rollouts.started == 8, "batch 2 needs version 1"
    await rollouts.published(1)
    assert len(await rollouts.batch(2)) == 4
    await starting


async def test_turns_ask_for_the_oldest_version_they_may_be_trained_on() -> None:
    source = StandInSource()
    rollouts = Rollouts(source, _plan())
    starting = asyncio.create_task(rollouts.run())
    await rollouts.published(5)
    for batch in range(3):
        await rollouts.batch(batch)
    await starting
    wanted = {request.split(".")[0]: version for request, version in source.asked}
    assert wanted == {"0": 0, "1": 0, "2": 0, "3": 0, "4": 1, "5": 1}


async def test_a_trajectory_that_cannot_go_on_counts_as_lost_and_blocks_nothing() -> None:
    source = StandInSource()
    source.fails.add("0.1")
    rollouts = Rollouts(source, _plan())
    starting = asyncio.create_task(rollouts.run())
    batch = await rollouts.batch(0)
    assert [one.name for one in batch if one.lost] == ["0.1"]
    assert rollouts.lost == 1
    await rollouts.finish()
    await starting

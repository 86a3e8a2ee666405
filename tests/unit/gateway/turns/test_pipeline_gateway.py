"""A trainer's pipeline over gateways that are processes: versions move in mid-turn, one dies."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rose.client import (
    Retry,
    RolloutClient,
    RolloutPipeline,
    Sampling,
    Session,
    StalenessBound,
    StepPlan,
    TrainingStep,
    Turn,
)
from tests.fakes.replica import StandInReplica
from tests.harness.processes import Forked
from tests.unit.gateway.gateway_cases import until

STEPS, GROUPS, SAMPLES, TOKENS = 5, 3, 2, 8
MOST_STEPS = 20 * STEPS
PLAN = StepPlan(GROUPS, SAMPLES, StalenessBound(1), concurrency=64)


@asynccontextmanager
async def gateway_process(*replicas: StandInReplica) -> AsyncIterator[tuple[Forked, str]]:
    """`rose gateway --replica …` over these replicas, which answers already, and its URL."""
    options: list[str] = []
    for number, replica in enumerate(replicas):
        options += ["--replica", f"ded-{number}=dedicated={replica.url}"]
    process = Forked("-m", "rose.main.gateway", "--port", "0", *options, stdout=True)
    try:
        yield process, (await process.line()).split()[-1]
    finally:
        await asyncio.to_thread(process.end)


@dataclass(frozen=True)
class PlayedEpisode:
    prompt: int
    turns: tuple[Turn, ...]

    @property
    def stamps(self) -> list[int]:
        return [version for turn in self.turns for version, _, _ in turn.versions]


async def episode(session: Session, prompt: int, sample: int) -> PlayedEpisode:
    """Two turns, the second one streamed; every fourth prompt talks on."""
    tokens, turns = [1, 100 * prompt], []
    for number in range(6 if prompt % 4 == 0 else 2):
        if number % 2:
            async with session.stream(tokens, Sampling(max_tokens=TOKENS)) as stream:
                async for _ in stream:
                    pass
            turns.append(stream.turn)
        else:
            turns.append(await session.generate(tokens, Sampling(max_tokens=TOKENS)))
        tokens += turns[-1].token_ids
    # One unbroken count: no token was lost, doubled or of another trajectory.
    assert tokens[1:] == [*range(100 * prompt, 100 * prompt + len(tokens) - 1)]
    return PlayedEpisode(prompt, tuple(turns))


def look_at(step: TrainingStep[int, PlayedEpisode]) -> list[int]:
    for group in step.groups:
        assert {played.prompt for played in group.samples} == {group.prompt}
        stamps = [version for played in group.samples for version in played.stamps]
        assert group.oldest_version == min(stamps) >= step.version - 1
        for played in group.samples:
            assert all(turn.versions[-1][2] == TOKENS for turn in played.turns)
    return [group.prompt for group in step.groups]


async def test_every_token_is_in_time_while_versions_move_in_mid_turn() -> None:
    async with (
        StandInReplica(delay_s=0.01) as quick,
        StandInReplica(delay_s=0.01) as late,
        gateway_process(quick, late) as (_, url),
        RolloutClient(url, timeout_s=20) as client,
        RolloutPipeline(client, episode, range(10**6), PLAN) as pipeline,
    ):
        trained: list[int] = []
        version = spanning = 0
        # A version comes in the middle of a turn in some step, by chance.
        while version < STEPS or (not spanning and version < MOST_STEPS):
            version += 1
            step = await pipeline.take()
            assert step is not None
            trained += look_at(step)
            turns = [turn for group in step.groups for p in group.samples for turn in p.turns]
            spanning += sum(len(turn.versions) > 1 for turn in turns)
            assert step.version == version - 1
            # One replica takes it up in the middle of its turns, the other one step later.
            late.version, quick.version = quick.version, version
            pipeline.publish(version)
        progress = pipeline.progress()
    assert max(Counter(trained).values()) == 1
    assert len(trained) == progress.trained == version * GROUPS
    assert spanning > 0, "the test means nothing when no turn spans two versions"
    # The gateway's fence held: nothing older than asked for came back.
    assert (progress.retried, progress.dropped) == (0, 0)


async def test_a_gateway_that_dies_costs_no_prompt_and_no_bound() -> None:
    async with (
        StandInReplica(delay_s=0.01) as one,
        StandInReplica(delay_s=0.01) as other,
        gateway_process(one, other) as (dying, dead_url),
        gateway_process(one, other) as (_, url),
        RolloutClient([dead_url, url], timeout_s=20, retry=Retry(9, 0.01, 0.1)) as client,
    ):
        trained: list[int] = []
        async with RolloutPipeline(client, episode, range(11), PLAN) as pipeline:
            await until(lambda: one.live + other.live > 4)
            await asyncio.to_thread(dying.end)
            async for step in pipeline:
                assert step.dropped == ()
                trained += look_at(step)
                one.version = other.version = step.version + 1
                pipeline.publish(step.version + 1)
        assert sorted(trained) == [*range(11)]
        assert client.progress().repeated_tries > 0, "nobody noticed the death"
        assert client.progress().running == ()
        await until(lambda: one.live == other.live == 0)


async def test_what_aged_out_and_what_is_left_behind_stops_at_the_replica() -> None:
    async with (
        StandInReplica() as replica,
        gateway_process(replica) as (_, url),
        RolloutClient(url, timeout_s=20) as client,
    ):
        replica.hang_after = 3
        everything = 2 * GROUPS * SAMPLES
        async with RolloutPipeline(client, episode, range(100), PLAN) as pipeline:
            await until(lambda: replica.live == everything)
            replica.version = 1
            pipeline.publish(1)
            await asyncio.sleep(0.05)
            assert (replica.cancelled, replica.live) == (0, everything)
            replica.version = 2
            pipeline.publish(2)
            await until(lambda: replica.cancelled == everything)
            # The same prompts again, no others: nothing is beyond the room for them.
            await until(lambda: replica.live == everything)
            asked = Counter(request["token_ids"][1] for request in replica.requests)
            assert asked == {100 * prompt: 2 * SAMPLES for prompt in range(2 * GROUPS)}
            assert pipeline.progress().aged_out == 2 * GROUPS
        await until(lambda: replica.live == 0)
        assert replica.cancelled == 2 * everything

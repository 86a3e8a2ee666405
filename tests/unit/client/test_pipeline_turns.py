"""Requests of a pipeline's turns, and the answers that it refuses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from rose.client import (
    GroupsDropped,
    RolloutClient,
    RolloutPipeline,
    Sampling,
    Session,
    StalenessBound,
    StepPlan,
)
from tests.fakes.gateway import StandInGateway, until

ONE = StepPlan(groups=1, samples=1, bound=StalenessBound(0), retries=1)
THREE = Sampling(max_tokens=3)


async def _whole(session: Session, prompt: int, sample: int, **options: Any) -> None:
    await session.generate([1, prompt], THREE, **options)


async def _streamed(session: Session, prompt: int, sample: int) -> None:
    async with session.stream([1, prompt], THREE) as stream:
        async for _ in stream:
            pass


@asynccontextmanager
async def one_turn(
    version: int, episode: Any, prompts: list[int]
) -> AsyncIterator[tuple[StandInGateway, RolloutPipeline[int, Any]]]:
    """Have a pipeline of one-turn steps that begins at version 4, at a gateway with `version`."""
    async with (
        StandInGateway(version=version) as gateway,
        RolloutClient(gateway.url) as client,
        RolloutPipeline(client, episode, prompts, ONE, version=4) as pipeline,
    ):
        yield gateway, pipeline


@pytest.mark.parametrize("episode", [_whole, _streamed])
@pytest.mark.parametrize("version", [3, -1])
async def test_an_answer_older_than_asked_for_is_an_error_not_a_sample(
    episode: Any, version: int
) -> None:
    async with one_turn(version, episode, [7]) as (gateway, pipeline):
        with pytest.raises(GroupsDropped, match="4 or newer was asked for"):
            await pipeline.take()
        step = await pipeline.take()
        assert step is not None
        assert ([lost.prompt for lost in step.dropped], step.groups) == ([7], ())
        assert await pipeline.take() is None
    assert [asked["min_version"] for asked in gateway.asked] == [4, 4]
    assert len(set(gateway.sessions)) == 2, "a sample that is tried again is another trajectory"


@pytest.mark.parametrize("episode", [_whole, _streamed])
async def test_kv_that_is_older_than_asked_for_makes_its_tokens_too_old(episode: Any) -> None:
    async with one_turn(4, episode, [7, 8]) as (gateway, pipeline):
        gateway.kv_version = 3
        with pytest.raises(GroupsDropped, match="tokens of version 3 came though 4 or newer"):
            await pipeline.take()
        gateway.kv_version = None
        step = await pipeline.take()
        assert step is not None
        assert [group.oldest_version for group in step.groups] == [4]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, (4, None)),
        ({"min_version": 2}, (4, None)),
        ({"min_version": 5}, (5, None)),
        ({"exact_version": 5}, (None, 5)),
    ],
)
async def test_a_turn_may_ask_for_more_than_the_bound_but_not_for_less(
    options: dict[str, Any], asked: tuple[Any, Any]
) -> None:
    async with one_turn(5, partial(_whole, **options), [7]) as (gateway, pipeline):
        step = await pipeline.take()
        assert step is not None
        assert step.groups[0].oldest_version == 5
    sent = gateway.asked[0]
    assert (sent.get("min_version"), sent.get("exact_version")) == asked


async def test_a_version_that_is_too_old_to_train_on_is_not_even_asked_for() -> None:
    async with one_turn(3, partial(_whole, exact_version=3), [7]) as (gateway, pipeline):
        with pytest.raises(GroupsDropped, match="VersionNotServed: exact_version 3"):
            await pipeline.take()
    assert gateway.asked == []


async def test_an_episode_that_will_not_end_can_start_no_turn_and_delivers_nothing() -> None:
    """The episode swallows its cancellation and the errors, and returns a result in the end."""
    stubborn: list[BaseException] = []

    async def episode(session: Session, prompt: int, sample: int) -> str:
        if stubborn:
            await _whole(session, prompt, sample)
            return "good"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            stubborn.append(error)
        try:
            await _whole(session, prompt, sample)
        except Exception as error:
            stubborn.append(error)
        return "void"

    async with StandInGateway(version=1) as gateway, RolloutClient(gateway.url) as client:

        async def first(session: Session, prompt: int, sample: int) -> str:
            # A turn makes the group as old as version 0.
            gateway.version = 1 if stubborn else 0
            await _whole(session, prompt, sample)
            return await episode(session, prompt, sample)

        async with RolloutPipeline(client, first, [7], ONE) as pipeline:
            await until(lambda: len(gateway.ended_sessions) == 0 and len(gateway.asked) == 1)
            await asyncio.sleep(0.05)
            pipeline.publish(1)
            step = await pipeline.take()
    assert step is not None
    assert [group.samples for group in step.groups] == [("good",)]
    assert [type(error).__name__ for error in stubborn] == ["CancelledError", "TurnCancelled"]

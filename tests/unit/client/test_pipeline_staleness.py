"""The whole pipeline over made-up replicas in virtual time: no token beyond the bound, ever."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_fleet import StandInFleet
from virtual_time import run_virtually

from rose.client import (
    GroupsDropped,
    RolloutPipeline,
    RolloutProgress,
    Sampling,
    Session,
    StalenessBound,
    StepPlan,
    TailPlan,
    TrainingStep,
)
from tests.harness.examples import times

PLANS = st.builds(
    StepPlan,
    groups=st.integers(1, 4),
    samples=st.integers(1, 3),
    bound=st.builds(StalenessBound, st.integers(0, 3)),
    concurrency=st.integers(1, 20),
    retries=st.integers(0, 3),
    restarts=st.integers(0, 2),
    tail=st.none() | st.builds(TailPlan, st.sampled_from([0.0, 0.4]), st.sampled_from([0.0, 0.4])),
)


@dataclass(frozen=True)
class RunCourse:
    """Course of a run.

    skips: versions published beyond the one of each step. hasty: how often one is published while
    the trainer waits for a step.
    """

    seed: int
    prompts: int
    fails: float
    late: float
    lag_s: float
    lies: int
    raises: float
    skips: float
    hasty: int
    slow_prompts: bool
    streams: bool


COURSES = st.builds(
    RunCourse,
    seed=st.integers(0, 2**32),
    prompts=st.integers(0, 30),
    fails=st.sampled_from([0.0, 0.05, 0.5]),
    late=st.sampled_from([0.0, 0.5]),
    lag_s=st.sampled_from([0.0, 1.0, 8.0]),
    lies=st.sampled_from([0, 0, 10]),
    raises=st.sampled_from([0.0, 0.1]),
    skips=st.sampled_from([0.0, 0.3]),
    hasty=st.sampled_from([0, 0, 10]),
    slow_prompts=st.booleans(),
    streams=st.booleans(),
)


@dataclass(frozen=True)
class Played:
    """Result of an episode: the stamps that the episode itself saw."""

    prompt: int
    sample: int
    stamps: tuple[int, ...]


@dataclass
class PipelineTrainer:
    """Takes, trains, publishes; keeps books of its own."""

    plan: StepPlan
    course: RunCourse
    out: Counter[int] = field(default_factory=Counter)
    playing: int = 0
    most_playing: int = 0
    drawn: int = 0
    known: int = 0
    errors: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.course.seed)
        course = self.course
        self.fleet = StandInFleet(
            self.dice, lag_s=course.lag_s, fails=course.fails, late=course.late, lies=course.lies
        )

    async def episode(self, session: Session, prompt: int, sample: int) -> Played:
        self.playing += 1
        self.most_playing = max(self.most_playing, self.playing)
        stamps: list[int] = []
        try:
            for _ in range(self.dice.randrange(4)):
                await asyncio.sleep(self.dice.random())
                if self.dice.random() < self.course.raises:
                    raise RuntimeError("the environment broke")
                if self.course.streams:
                    async with session.stream([1], Sampling()) as stream:
                        stamps += [chunk.version async for chunk in stream]
                else:
                    turn = await session.generate([1], Sampling())
                    stamps += [version for version, _, _ in turn.versions]
            return Played(prompt, sample, tuple(stamps))
        finally:
            self.playing -= 1

    async def prompts(self) -> AsyncIterator[int]:
        for prompt in range(self.course.prompts):
            if self.course.slow_prompts:
                await asyncio.sleep(self.dice.random() * 2)
            self.drawn += 1
            yield prompt

    def source(self) -> AsyncIterator[int] | Iterable[int]:
        return self.prompts() if self.course.slow_prompts else range(self.course.prompts)

    def look_at(self, step: TrainingStep[int, Played]) -> None:
        oldest = self.fleet.version - self.plan.bound.max_versions
        assert step.version == self.fleet.version
        for group in step.groups:
            assert [played.prompt for played in group.samples] == [group.prompt] * self.plan.samples
            assert len({played.sample for played in group.samples}) == self.plan.samples
            stamps = [version for played in group.samples for version in played.stamps]
            assert min(stamps, default=oldest) >= oldest, "a token beyond the bound is trained on"
            assert group.oldest_version == min(stamps, default=None)
        self.out.update(group.prompt for group in step.groups)
        self.out.update(lost.prompt for lost in step.dropped)

    async def hasten(self, pipeline: RolloutPipeline[int, Played]) -> None:
        """Versions that come out at any time, as of a trainer that takes in another task."""
        for _ in range(self.course.hasty):
            await asyncio.sleep(self.dice.random() * 4)
            self.publish(pipeline, 1)

    def publish(self, pipeline: RolloutPipeline[int, Played], by: int) -> None:
        self.fleet.publish(self.fleet.version + by)
        pipeline.publish(self.fleet.version)

    async def run(self) -> RolloutProgress:
        pipeline = RolloutPipeline(self.fleet, self.episode, self.source(), self.plan)
        async with pipeline:
            hurry = asyncio.create_task(self.hasten(pipeline))
            while True:
                try:
                    step = await pipeline.take()
                except GroupsDropped:
                    self.errors += 1
                    continue
                if step is None:
                    break
                self.look_at(step)
                # Hasty versions must not come out while this step is trained on.
                if not self.course.hasty:
                    await asyncio.sleep(self.dice.random() * 3)
                    assert step.version == self.fleet.version, "nothing was published meanwhile"
                self.publish(pipeline, 1 + (self.dice.random() < self.course.skips))
            hurry.cancel()
            progress = pipeline.progress()
        await asyncio.gather(hurry, return_exceptions=True)
        return progress


@settings(max_examples=times(2.5))
@given(PLANS, COURSES)
def test_no_token_beyond_the_bound_no_prompt_lost_or_doubled_and_no_deadlock(
    plan: StepPlan, course: RunCourse
) -> None:
    trainer = PipelineTrainer(plan, course)
    progress = run_virtually(trainer.run())
    assert trainer.out == Counter(range(course.prompts))
    assert progress.trained + progress.dropped == course.prompts
    assert trainer.most_playing <= plan.concurrency
    # Everything was cancelled at its gateway or came to its end, every session was finished.
    assert (trainer.playing, trainer.fleet.live, trainer.fleet.open_sessions) == (0, 0, set())
    if not (course.fails or course.raises or course.lies or trainer.fleet.refused):
        assert progress.dropped == progress.retried == trainer.errors == 0


@given(PLANS, COURSES, st.floats(0.0, 30.0))
def test_leaving_at_any_time_ends_everything(
    plan: StepPlan, course: RunCourse, after_s: float
) -> None:
    trainer = PipelineTrainer(plan, course)

    async def left() -> Any:
        try:
            async with asyncio.timeout(after_s):
                return await trainer.run()
        except TimeoutError:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not [task for task in others if "hasten" not in repr(task)]
            return None

    run_virtually(left())
    assert (trainer.playing, trainer.fleet.live, trainer.fleet.open_sessions) == (0, 0, set())


def test_who_is_cancelled_while_leaving_leaves_nothing_behind() -> None:
    fleet = StandInFleet(random.Random(0), finish_s=(1.0,))

    async def episode(session: Session, prompt: int, sample: int) -> None:
        await session.generate([1], Sampling())

    async def impatient() -> None:
        pipeline = RolloutPipeline(fleet, episode, [0], StepPlan(1, 1, StalenessBound(0)))
        async with asyncio.timeout(None) as patience, pipeline:
            assert await pipeline.take() is not None
            assert len(fleet.open_sessions) == 1
            patience.reschedule(asyncio.get_running_loop().time() + 0.1)

    with pytest.raises(TimeoutError):
        run_virtually(impatient())
    assert fleet.open_sessions == set()


@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 2.0]),
)
def test_a_prompt_ages_out_no_more_often_than_the_plan_says(
    seed: int, groups: int, max_versions: int, restarts: int, late: float, lag_s: float
) -> None:
    """One version a step, replicas that honour what turns ask for: then steps wait instead."""
    plan = StepPlan(groups, 2, StalenessBound(max_versions), 64, restarts=restarts)
    course = RunCourse(seed, 25, 0.0, late, lag_s, 0, 0.0, 0.0, 0, False, False)
    trainer = PipelineTrainer(plan, course)
    most = 0
    plain = trainer.look_at

    def look_at(step: TrainingStep[int, Played]) -> None:
        nonlocal most
        most = max([most, *(group.restarts for group in step.groups)])
        plain(step)

    trainer.look_at = look_at  # type: ignore[method-assign]
    # Some episodes take as long as several steps.
    trainer.fleet.max_tokens_s = 6.0
    run_virtually(trainer.run())
    assert most <= restarts

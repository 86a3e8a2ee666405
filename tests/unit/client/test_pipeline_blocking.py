"""The pipeline for a trainer that is plain code: the same steps, from any thread."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.client import (
    BlockingRolloutClient,
    BlockingRolloutPipeline,
    ClientClosed,
    GroupsDropped,
    RolloutPipeline,
    Sampling,
    Session,
    StalenessBound,
    StepPlan,
    TailPlan,
)
from tests.fakes.gateway import StandInGateway

CLIENT_MD = Path(__file__).parents[3] / "docs/client.md"
PLAN = StepPlan(groups=2, samples=2, bound=StalenessBound(1), retries=0)


async def episode(session: Session, prompt: int, sample: int) -> tuple[int, ...]:
    turn = await session.generate([1, prompt], Sampling(max_tokens=3, seed=sample))
    return turn.token_ids


@pytest.mark.parametrize("tail", [None, TailPlan(0.5, 0.5)])
def test_steps_are_a_plain_loop(gateway: StandInGateway, tail: TailPlan | None) -> None:
    plan = StepPlan(2, 2, StalenessBound(1), tail=tail)
    trained: list[int] = []
    with (
        BlockingRolloutClient(gateway.url) as client,
        BlockingRolloutPipeline(client, episode, range(0, 90, 10), plan) as pipeline,
    ):
        for step in pipeline:
            for group in step.groups:
                first = group.prompt + 1
                assert group.samples == ((first, first + 1, first + 2),) * 2
                trained.append(group.prompt)
            gateway.version = step.version + 1
            pipeline.publish(step.version + 1)
        assert pipeline.progress().trained == 9
    assert sorted(trained) == [*range(0, 90, 10)]
    assert set(gateway.ended_sessions) == set(gateway.sessions)
    assert {asked["min_version"] for asked in gateway.asked} > {0}
    with pytest.raises(ClientClosed, match="not open"):
        pipeline.take()


def test_groups_are_taken_while_the_slowest_of_their_step_runs(gateway: StandInGateway) -> None:
    told = threading.Event()

    async def playing(session: Session, prompt: int, sample: int) -> tuple[int, ...]:
        while prompt % 2 and not told.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return await episode(session, prompt, sample)

    plan = StepPlan(2, 2, StalenessBound(0))
    found = []
    with (
        BlockingRolloutClient(gateway.url) as client,
        BlockingRolloutPipeline(client, playing, range(4), plan) as pipeline,
    ):
        while (part := pipeline.take(part=True)) is not None:
            found.append((part.version, [group.prompt for group in part.groups], part.last))
            told.set()
            if part.last:
                told.clear()
                gateway.version = part.version + 1
                pipeline.publish(part.version + 1)
    assert found == [(0, [0], False), (0, [1], True), (1, [2], False), (1, [3], True)]


def test_prompts_that_break_off_are_trained_on_as_far_as_they_came(gateway: StandInGateway) -> None:
    def prompts() -> Iterator[int]:
        yield from range(3)
        raise OSError("the data set ended early")

    with (
        BlockingRolloutClient(gateway.url) as client,
        BlockingRolloutPipeline(client, episode, prompts(), PLAN) as pipeline,
    ):
        for groups in (2, 1):
            step = pipeline.take()
            assert step is not None
            assert len(step.groups) == groups
        with pytest.raises(OSError, match="ended early"):
            pipeline.take()


def test_episodes_that_fail_end_a_step_with_their_error(gateway: StandInGateway) -> None:
    told = threading.Event()

    async def playing(session: Session, prompt: int, sample: int) -> tuple[int, ...]:
        if prompt < 2:
            raise OSError(f"the environment of {prompt} broke")
        while not told.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return await episode(session, prompt, sample)

    with (
        BlockingRolloutClient(gateway.url) as client,
        BlockingRolloutPipeline(client, playing, range(5), PLAN) as pipeline,
    ):
        with pytest.raises(GroupsDropped, match="OSError: the environment of 1 broke") as raised:
            pipeline.take()
        assert isinstance(raised.value.__cause__, OSError)
        told.set()
        dropped, trained = [], []
        for step in pipeline:
            dropped += [(lost.prompt, str(lost.error)) for lost in step.dropped]
            trained += [group.prompt for group in step.groups]
    assert dropped == [(prompt, f"the environment of {prompt} broke") for prompt in (0, 1)]
    assert sorted(trained) == [2, 3, 4]


def test_versions_only_grow(gateway: StandInGateway) -> None:
    with (
        BlockingRolloutClient(gateway.url) as client,
        BlockingRolloutPipeline(client, episode, [], PLAN, version=4) as pipeline,
    ):
        with pytest.raises(ValueError, match="versions grow"):
            pipeline.publish(3)
        assert pipeline.take() is None


async def test_without_its_block_it_says_so() -> None:
    pipeline = RolloutPipeline(StandInGateway(), episode, [1], PLAN)  # type: ignore[arg-type]
    with pytest.raises(ClientClosed, match="not open"):
        await pipeline.take()


def test_the_example_of_the_documentation_runs(
    gateway: StandInGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"```python\n(.*?)```", CLIENT_MD.read_text(), flags=re.DOTALL)
    (example,) = [text for text in examples if "RolloutPipeline(client" in text]
    gateway.version = 9
    exec(example, {"URLS": [gateway.url]})
    assert "trained=16, dropped=0" in capsys.readouterr().out

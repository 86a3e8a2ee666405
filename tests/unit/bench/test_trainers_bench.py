"""A fleet for a trainer tells it all that it asks for; a measurement judges by its limits."""

from dataclasses import replace
from pathlib import Path

import pytest

from rose.bench.trainers.stack import NODE, TrainerStack
from rose.bench.trainers.trl_measure import Run, draw, summary, table
from rose.errors import EngineStartError
from rose.integrations import TrainerSettings
from rose.node.config import NodeConfig


@pytest.fixture
def stack(tmp_path: Path) -> TrainerStack:
    (tmp_path / "model").mkdir()
    return TrainerStack(tmp_path / "stack", tmp_path / "model", replicas=2)


def test_a_trainer_reads_in_its_environment_what_the_fleet_was_made_with(
    stack: TrainerStack,
) -> None:
    given = {"replicas": 2, "take_over": True, "timeout_s": 9.5}
    assert TrainerSettings.from_env(stack.environ(**given)) == stack.settings(**given)


def test_its_node_has_a_replica_for_each_that_was_wanted(stack: TrainerStack) -> None:
    config = NodeConfig.load(stack.folder / "node.json")
    assert [each.id for each in config.replicas] == ["dedicated-0", "dedicated-1"]
    assert (config.node, config.verify_key) == (
        NODE,
        stack.settings().signing_key().verify_key.hex,
    )


def test_a_member_that_ended_is_named_at_once(stack: TrainerStack) -> None:
    with pytest.raises(EngineStartError, match="no replicas: scheduler ended"):
        stack.until(lambda: False, 60.0, "replicas")


def run(arm: str, step_s: float, rewards: list[float], drift: float | None = 0.001) -> Run:
    return Run(arm, 0, rewards, [step_s] * 40, [0.3] * 40, drift)


RISES, FALLS = [0.1] * 20 + [0.4] * 20, [0.4] * 20 + [0.1] * 20
GOOD = [run("server", 0.52, RISES), run("stock", 0.5, FALLS), run("async", 0.0, RISES, None)]


def test_a_step_a_tenth_longer_than_on_a_stock_engine_is_within_the_limit() -> None:
    found = summary(GOOD, [0.5])
    assert found["holds"]
    assert found["step_ratio"] == pytest.approx(1.04)
    assert "1 of 1" in table(found)
    assert len(draw(GOOD).axes) == 2


@pytest.mark.parametrize(
    "worse",
    [
        [replace(GOOD[0], step_s=[0.56] * 40), *GOOD[1:]],
        [replace(GOOD[0], rewards=FALLS), *GOOD[1:]],
        [replace(GOOD[0], drift=0.02), *GOOD[1:]],
        [*GOOD[:2], replace(GOOD[2], rewards=FALLS)],
    ],
    ids=["slower", "learns nothing", "drifts", "async learns nothing"],
)
def test_what_is_beyond_a_limit_does_not_hold(worse: list[Run]) -> None:
    assert not summary(worse, [0.5])["holds"]

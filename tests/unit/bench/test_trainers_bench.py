"""Measurements of trainers are judged by their limits."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.trainers import curves, turns_measure
from bench.trainers.trl_measure import TrlRun, summary, table
from bench.trainers.turns_measure import ROSE, SINGLE, STOCK, TurnsArm


def arm(name: str, time_s: float) -> TurnsArm:
    return TurnsArm(name, "", {}, "m", {}, [time_s] * 40, {"server": 40 * 0.01})


def test_a_request_is_judged_beside_the_stock_engines_of_the_same_moment() -> None:
    arms = [arm(ROSE, 0.105), arm(SINGLE, 0.15), arm(STOCK, 0.1)]
    found = turns_measure.summary(arms)
    assert found["holds"]
    assert found["arms"][SINGLE]["ratio"].value == pytest.approx(1.5)
    assert found["arms"][ROSE]["spent_s"] == {"server": pytest.approx(0.01)}
    assert "105.0" in turns_measure.table(found)
    assert not turns_measure.summary([arm(ROSE, 0.12), *arms[1:]])["holds"]


def run(arm: str, step_s: float, rewards: list[float], drift: float | None = 0.001) -> TrlRun:
    return TrlRun(arm, 0, rewards, [step_s] * 40, [0.3] * 40, drift, [0.2] * 40)


RISES, FALLS = [0.1] * 20 + [0.4] * 20, [0.4] * 20 + [0.1] * 20
GOOD = [
    run("server", 0.9, RISES),
    run("unsynced", 0.52, FALLS),
    run("stock", 0.5, FALLS),
    run("async", 0.0, RISES, None),
]


def test_a_step_a_tenth_longer_than_on_a_stock_engine_is_within_the_limit() -> None:
    found = summary(GOOD, [0.5])
    assert found["holds"]
    assert found["step_ratio"].value == pytest.approx(1.04)
    assert found["turns_s"] == {"unsynced": 0.2, "stock": 0.2, "server": 0.2}
    assert "1 of 1" in table(found)


@pytest.mark.parametrize(
    "worse",
    [
        [GOOD[0], replace(GOOD[1], step_s=[0.56] * 40), *GOOD[2:]],
        [replace(GOOD[0], rewards=FALLS), *GOOD[1:]],
        [replace(GOOD[0], drift=0.02), *GOOD[1:]],
        [*GOOD[:3], replace(GOOD[3], rewards=FALLS)],
    ],
    ids=["slower", "learns nothing", "drifts", "async learns nothing"],
)
def test_what_is_beyond_a_limit_does_not_hold(worse: list[TrlRun]) -> None:
    assert not summary(worse, [0.5])["holds"]


def trained(way: str, *runs: Sequence[float]) -> curves.CurveRecord:
    made = {seed: curves.Curve(seed, list(rewards)) for seed, rewards in enumerate(runs)}
    return curves.CurveRecord(way, made)


def test_a_reward_rose_where_its_last_third_is_above_its_first() -> None:
    assert trained("trl-server", RISES, RISES).holds(2)
    assert not trained("trl-server", RISES, FALLS).holds(2)
    assert not trained("trl-server", RISES).holds(2), "a seed that was not trained has not risen"

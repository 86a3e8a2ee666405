"""Measurements of trainers are judged by their limits."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("reward", "steps", "drift", "staleness"),
    [
        (
            "reward",
            [
                {"reward": 0.1, "sampling/sampling_logp_difference/mean": 0.002},
                {"reward": 0.3, "sampling/sampling_logp_difference/mean": 0.004},
            ],
            0.003,
            None,
        ),
        (
            "critic/score/mean",
            [
                {
                    "critic/score/mean": score,
                    "training/rollout_probs_diff_mean": 0.003,
                    "training/off_policy/trajectory_staleness/max": age,
                }
                for score, age in ((0.1, 0.0), (0.3, 1.0))
            ],
            0.003,
            1.0,
        ),
    ],
    ids=["TRL", "verl"],
)
def test_a_curve_is_read_from_what_its_trainer_logs(
    reward: str, steps: list[dict[str, Any]], drift: float, staleness: float | None
) -> None:
    found = curves.curve(3, steps, reward)
    assert (found.seed, found.rewards, found.staleness) == (3, [0.1, 0.3], staleness)
    assert found.drift == pytest.approx(drift)


def test_seeds_that_are_trained_one_by_one_are_one_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 0):
        record = curves.CurveRecord.load(tmp_path, "verl-sync")
        record.curves[seed] = curves.Curve(seed, RISES, drift=0.001, staleness=0.0)
        record.save(tmp_path)
    assert curves.main([f"--out={tmp_path}", "--seeds=2"]) == 1, "three ways were not trained"
    said = capsys.readouterr().out
    assert said == (tmp_path / "curves.txt").read_text()
    assert said.index("verl-sync, seed 0") < said.index("verl-sync, seed 1")
    assert (tmp_path / "curves.png").stat().st_size


def test_curves_of_trl_are_those_that_were_measured_beside_a_stock_engine(tmp_path: Path) -> None:
    (tmp_path / "trl.json").write_text(json.dumps({"runs": [asdict(each) for each in GOOD]}))
    record = curves.CurveRecord.load(tmp_path, "trl-server")
    assert record.curves == {0: curves.Curve(0, RISES, 0.001)}
    assert not curves.CurveRecord.load(tmp_path, "verl-sync").curves


def test_a_way_without_its_environment_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curves, "ROOT", tmp_path)
    assert curves.main(["verl-async", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err.endswith("make it: scripts/trainer-env verl\n")

"""Decisions of benchmarks on which a published figure rests, one table for each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.chaos import ChaosFindings
from bench.common.checks import Check
from bench.coserve.busy_hold import HostBusyHold, limit_of
from bench.coserve.plan import ArmCell, fit_rounds, rounds_wanted
from bench.gateway import AT_STREAMS, checks, rows, table
from bench.load.streams import REPLICA, TOKEN_STREAM
from bench.soak import SoakSeen, growth
from bench.soak import checks as soak_checks
from bench.trainers import curves, trl_measure, turns_measure
from bench.trainers.trl_measure import TrlRun
from bench.trainers.turns_measure import ROSE, SINGLE, STOCK, TurnsArm
from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.client import Turn

TICK_S = 0.02


def failed(found: Sequence[Check]) -> list[str]:
    return [each.name for each in found if each.decisive and each.verdict == "FAILS"]


def _cell(router: str, p50_s: float, **more: Any) -> dict[str, Any]:
    quantiles = {"p50": p50_s, "p99": 2 * p50_s, "max": 3 * p50_s}
    cell = {"engine": "standin replica", "router": router, "baseline": REPLICA.name, "round": 0}
    cell |= {"wire": REPLICA.name if router == "direct" else TOKEN_STREAM.name}
    cell |= {"streams": AT_STREAMS, "due_turns_per_s": 100.0, "turns_per_s": 100.0, "turns": 500}
    cell |= {"first_s": quantiles, "later_s": quantiles, "errors": 0, "errors_kept": []}
    return cell | dict.fromkeys(("router_busy", "engine_busy", "generator_busy"), 0.1) | {
        "router_waited": 0.0, **more,
    }  # fmt: skip


def test_a_row_of_a_router_is_the_median_of_what_each_round_added() -> None:
    added = [(0.001, 0.0015), (0.002, 0.009), (0.001, 0.002)]
    cells = [
        _cell(router, p50_s, round=number)
        for number, (direct_s, rose_s) in enumerate(added)
        for router, p50_s in (("direct", direct_s), ("rose", rose_s))
    ]
    direct, rose = rows(cells)
    assert direct["added_ttft_p50_s"] is None
    assert rose["added_ttft_p50_s"] == pytest.approx(0.001)
    assert rose["added_itl_p99_s"] == pytest.approx(0.002)
    assert (rose["turns"], rose["limited_by"]) == (1500, "")
    judged = checks([direct, rose], [])
    assert f"added_ttft_p50_s, tokens at {AT_STREAMS} streams" not in failed(judged)
    assert f"tokens at {AT_STREAMS} streams" in table({"rows": [direct, rose], "checks": judged})


@pytest.mark.parametrize(
    ("worse", "check"),
    [
        ({"errors": 1}, "errors"),
        ({"turns_per_s": 10.0}, "turns of those due"),
        ({"first_s": {"p50": 0.1, "p99": 0.1, "max": 0.1}}, "added_ttft_p50_s"),
        ({"first_s": {"p50": 0.001, "p99": 0.1, "max": 0.1}}, "added_ttft_p99_s"),
        ({"later_s": {"p50": 0.001, "p99": 0.1, "max": 0.1}}, "added_itl_p99_s"),
        ({"later_s": {"p50": 0.001, "p99": 0.002, "max": 3.0}}, "worst s"),
    ],
)
def test_each_limit_of_a_router_can_fail(worse: dict[str, Any], check: str) -> None:
    made = rows([_cell("direct", 0.001), _cell("rose", 0.0015, **worse)])
    assert any(name.startswith(check) for name in failed(checks(made, [])))


def test_who_limits_a_cell_is_said_and_sessions_below_the_oracles_share_fail() -> None:
    made = rows([_cell("direct", 0.001, engine_busy=0.9), _cell("rose", 0.01, router_waited=0.5)])
    assert [row["limited_by"] for row in made] == ["engine", "others on the machine"]
    session = {"engine": "vllm", "of_oracle": 0.8}
    assert failed(checks([], [session]))
    assert not failed(checks([], [session | {"of_oracle": 0.9}]))


def phase(**seen: Any) -> SoakSeen:
    values = {"turns": 10, "took_s": 1.0, "rss_mib": [60.0] * 20, "descriptors": [9] * 20}
    return SoakSeen(**{**values, **seen})


STEP, PAUSE = "longest step of its event loop, s", "longest pause of its event loop, s"


@pytest.mark.parametrize(
    ("mixed", "storm", "names"),
    [
        ({"loop_busy_s": 0.11, "loop_lag_s": 0.2, "waited": 0.5}, {"turns": 0}, [STEP]),
        ({"loop_busy_s": 0.05, "loop_lag_s": 0.2, "waited": 0.01}, {"turns": 0}, [PAUSE]),
        ({"loop_busy_s": 0.05, "loop_lag_s": 0.2, "waited": 0.3}, {"turns": 0}, []),
        (
            {},
            {"turns": 2_000, "loop_busy_s": 0.3, "rss_mib": [301.0]},
            [f"2000 time-outs/s: {STEP}", "2000 time-outs/s: memory, MiB"],
        ),
    ],
    ids=["a long step", "a pause alone", "a pause beside others", "a storm by itself"],
)
def test_a_soak_fails_for_what_is_the_gateways_own_doing(
    mixed: dict[str, Any], storm: dict[str, Any], names: list[str]
) -> None:
    assert failed(soak_checks(phase(**mixed), phase(**storm))) == names


def test_memory_that_grows_to_the_end_is_growth_and_a_start_is_not() -> None:
    assert growth([*range(100)], 10) > 40
    assert growth([*range(50), *[50] * 50], 10) == 0


def _turn(**changes: Any) -> Turn:
    fields: dict[str, Any] = {"request_id": "r", "finish_reason": "length", "attempts": 1}
    fields |= {"token_ids": (1, 2, 3), "logprobs": (-1.0,) * 3, "versions": ((0, 0, 3),)}
    return Turn(**{**fields, "segments": (("a", "guest", 0, 3),), **changes})


@pytest.mark.parametrize(
    ("bad", "count"),
    [
        ({"token_ids": (1, 2, 2)}, "wrong_tokens"),
        ({"token_ids": (1, 2), "logprobs": (-1.0, -1.0)}, "wrong_tokens"),
        ({"token_ids": (1, 1, 2, 3)}, "wrong_tokens"),
        ({"versions": ((0, 0, 2),)}, "unstamped"),
        ({"versions": ((0, 0, 2), (-1, 2, 3))}, "unstamped"),
        ({"segments": (("a", "guest", 0, 1), ("b", "guest", 2, 3))}, "gaps"),
    ],
)
def test_whatever_is_wrong_with_a_turn_under_chaos_is_found(
    bad: dict[str, Any], count: str
) -> None:
    findings = ChaosFindings()
    findings.add(_turn(), _turn(), 3)
    assert findings.faults == 0
    findings.add(_turn(request_id="q", **bad), _turn(), 3)
    assert getattr(findings, count) == 1
    findings.add(_turn(), _turn(), 3)
    assert findings.doubled == 1


@pytest.mark.parametrize(
    ("played", "lent"),
    [
        ([("one", 0.3, 60.0)], 1.0),
        ([("one", 0.8, 30.0)], 1.0),
        ([("one", 0.95, 15.0), ("one", 0.8, 15.0)], 0.0),
        ([("one", 0.95, 15.0), ("one", 0.5, 15.0), ("one", 0.8, 15.0)], 1.0),
        ([("one", 0.9, 16.0), ("other", 0.3, 8.0), ("one", 0.9, 8.0)], 0.0),
        ([("one", 0.9, 16.0), ("other", 0.3, 8.0)], 1.0),
    ],
    ids=[
        *("light", "below the limit", "still held between", "lent again between"),
        *("held under its own load", "lent under another load"),
    ],
)
def test_between_the_thresholds_of_a_busy_host_a_hold_stays_as_it_is(
    played: list[tuple[str, float, float]], lent: float
) -> None:
    hold, now_s, busy_s, shares = HostBusyHold(limit_of(0.85)), 100.0, 0.0, list[float]()
    for load, busy, seconds in played:
        hold.begin(load)
        ticks, count = round(seconds / TICK_S), 0
        for _ in range(ticks):
            now_s, busy_s = now_s + TICK_S, busy_s + TICK_S * busy
            count += hold.lends(round(busy_s * 1e9), now_s)
        hold.end()
        shares.append(count / ticks)
    assert shares[-1] == lent


def test_another_limit_keeps_the_policys_hysteresis() -> None:
    assert (limit_of(0.85), limit_of(1.0)) == (MaxHostBusy(), None)
    lower = limit_of(0.5)
    assert lower is not None
    assert lower.resume < lower.share == 0.5


@pytest.mark.parametrize(("budget_s", "rounds"), [(2_000, [10, 3]), (900, [6, 3]), (1, [3, 3])])
def test_a_plan_that_is_too_long_loses_the_rounds_of_its_longest_cells(
    budget_s: float, rounds: list[int]
) -> None:
    cells = [ArmCell(0.3, "poisson", 5.0), ArmCell(0.9, "poisson", 50.0)]
    wanted = [rounds_wanted(cell, 20, 1_000, 3) for cell in cells]
    assert wanted == [10, 3]
    assert fit_rounds(wanted, 100, budget_s, 3) == rounds


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


@pytest.mark.parametrize(
    ("runs", "holds"),
    [
        (GOOD, True),
        ([GOOD[0], replace(GOOD[1], step_s=[0.56] * 40), *GOOD[2:]], False),
        ([replace(GOOD[0], rewards=FALLS), *GOOD[1:]], False),
        ([replace(GOOD[0], drift=0.02), *GOOD[1:]], False),
        ([*GOOD[:3], replace(GOOD[3], rewards=FALLS)], False),
    ],
    ids=["within all", "slower", "learns nothing", "drifts", "async learns nothing"],
)
def test_a_training_beyond_a_limit_does_not_hold(runs: list[TrlRun], holds: bool) -> None:
    found = trl_measure.summary(runs, [0.5])
    assert found["holds"] is holds
    assert found["turns_s"] == {"unsynced": 0.2, "stock": 0.2, "server": 0.2}
    assert f"{found['step_ratio'].value:.2f}" in trl_measure.table(found)


def test_a_reward_rose_where_its_last_third_is_above_its_first() -> None:
    def trained(*runs: Sequence[float]) -> curves.CurveRecord:
        made = {seed: curves.Curve(seed, list(rewards)) for seed, rewards in enumerate(runs)}
        return curves.CurveRecord("trl-server", made)

    assert trained(RISES, RISES).holds(2)
    assert not trained(RISES, FALLS).holds(2)
    assert not trained(RISES).holds(2), "a seed that was not trained has not risen"

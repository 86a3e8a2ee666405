import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.coserve.__main__ import main
from bench.coserve.plan import ARMS, EVENT_ARMS
from bench.coserve.records import read_run
from bench.coserve.result import RESULT, build_result, render, verify, write_result
from bench.coserve.rows import arm_of
from rose.compare import bootstrap
from tests.fakes.bench.coserve_run import StandInBench


@pytest.fixture(scope="module", autouse=True)
def _few_resamples() -> Iterator[None]:
    """Intervals as wide as with ten times as many, near enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "RESAMPLES", 200)
        yield


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run with a ROSE that nobody notices; the guest of one arm was held."""
    return result_of(tmp_path_factory.mktemp("unharmed"), held_arm="paper-0.0")


def result_of(tmp_path: Path, **knobs: Any) -> dict[str, Any]:
    return build_result(read_run(StandInBench(tmp_path / "run", **knobs).write()))


def row_of(result: dict[str, Any], arm: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if arm_of(row).name == arm)


def check_of(row: dict[str, Any], name: str) -> dict[str, Any]:
    return next(check for check in row["checks"] if check["name"] == name)


def test_a_guest_that_nobody_notices_holds_where_a_naive_one_fails(
    unharmed: dict[str, Any],
) -> None:
    result = unharmed
    assert {arm_of(row) for row in result["rows"]} == {*ARMS, *EVENT_ARMS}
    verdicts = {arm_of(row).name: row["verdict"] for row in result["rows"]}
    assert verdicts["alone"] == "REFERENCE"
    assert verdicts["naive"] == "FAILS"
    assert {verdicts[arm.name] for arm in ARMS if arm.guest == "rose"} == {"HOLDS"}
    assert verdicts["alone_again"] == "HOLDS"
    assert result["danger"] == "FAILS"
    assert result["verdict"] == "HOLDS"
    json.dumps(result, allow_nan=False)


def test_what_was_written_into_the_records_comes_out_of_the_row(unharmed: dict[str, Any]) -> None:
    row = row_of(unharmed, "adaptive-0.0")
    assert row["busy"] == pytest.approx(0.6)
    assert row["offered"] == pytest.approx(15, rel=0.1)
    assert row["guest_alone_tok_s"] == pytest.approx(1_000)
    assert row["guest_tok_s"] == pytest.approx(370)
    assert row["idle_efficiency"] == pytest.approx(0.92, rel=0.02)
    assert row["spare_efficiency"] == pytest.approx(0.37 / 0.75, rel=0.05)
    assert row["guest_step_p99_s"] == pytest.approx(0.006)
    assert row["guest_step_cpu_p99_s"] == pytest.approx(0.006)
    assert 0 < row["yield_p50_s"] < row["yield_p99_s"] <= 0.006
    assert row["ratio_to_alone_ci95"]["tpot_p90"] == pytest.approx([1, 1], abs=0.02)
    assert row["host"]["requests"] > 600
    held = {arm_of(row).name: row["held"] for row in unharmed["rows"]}
    assert (held["paper-0.0"], held["adaptive-0.0"], held["alone"]) == (1.0, 0.0, None)


def test_without_a_danger_nothing_is_proved(tmp_path: Path) -> None:
    result = result_of(tmp_path, slowdown={})
    assert row_of(result, "naive")["verdict"] == "HOLDS"
    assert result["danger"] == result["verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("knobs", "arm", "check"),
    [
        ({"slowdown": {"paper-0.0": 1.3, "naive": 1.6}}, "paper-0.0", "tpot_p90"),
        ({"slowdown": {"weight_apply": 1.9}}, "weight_apply", "ttft_p90"),
        ({"slowdown": {"adaptive-0.7": 9.0}}, "adaptive-0.7", "attainment_difference"),
        ({"wrong_tokens": {"adaptive-0.7": 1}}, "adaptive-0.7", "token_mismatches"),
        ({"preemptions": {"paper-0.7": 2}}, "paper-0.7", "host_preemptions"),
        ({"guest_share_of_idle": 0.5}, "adaptive-0.0", "idle_efficiency"),
        ({"guest_share_lent": 0.3}, "paper-0.7", "spare_efficiency"),
    ],
)
def test_each_limit_can_fail_and_then_the_run_does(
    tmp_path: Path, knobs: dict[str, Any], arm: str, check: str
) -> None:
    result = result_of(tmp_path, **knobs)
    row = row_of(result, arm)
    assert check_of(row, check)["verdict"] == "FAILS"
    assert row["verdict"] == result["verdict"] == "FAILS"


def test_lent_slack_may_slow_the_host_within_its_targets(tmp_path: Path) -> None:
    row = row_of(result_of(tmp_path, slowdown={"adaptive-0.7": 2.0}), "adaptive-0.7")
    assert row["ratio_to_alone"]["tpot_p90"] > 1.5
    assert row["host"]["attainment"] == 1.0
    assert row["verdict"] == "HOLDS"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "no limit"),
        ({"max_host_busy": 0.85}, "0.85 over 10 s; held from there on, lent again below 0.7"),
    ],
)
def test_the_page_says_the_limit_of_a_busy_host(
    unharmed: dict[str, Any], settings: dict[str, Any], told: str
) -> None:
    run = unharmed["run"] | {"settings": unharmed["run"]["settings"] | settings}
    page = render(unharmed | {"run": run})
    assert f"max host busy: {told}" in page
    assert " held " in page.splitlines()[0]


def test_few_requests_decide_nothing_about_p99(unharmed: dict[str, Any]) -> None:
    for row in unharmed["rows"]:
        for check in row["checks"]:
            if check["name"].endswith("_p99"):
                assert check["verdict"] == "INCONCLUSIVE"
                assert not check["decisive"]


def test_every_figure_is_recomputed_and_a_changed_one_is_found(tmp_path: Path) -> None:
    folder = StandInBench(tmp_path / "run", rounds=2).write()
    written = write_result(folder)
    assert verify(folder) == []
    assert main(["verify", str(folder)]) == 0
    written["rows"][0]["host"]["ttft_p90_s"] *= 1.001
    (folder / RESULT).write_text(json.dumps(written))
    assert [d.field for d in verify(folder)] == ["rows[0].host.ttft_p90_s"]
    assert main(["verify", str(folder)]) == 1

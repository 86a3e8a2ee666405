"""Judgement of a card, on the records of a bench that never ran."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.coserve.records import CoserveRecords, read_run
from bench.coserve.rows import Analysis, arm_of
from bench.gpu.loads import card_rules, requests_wanted
from bench.gpu.pieces import served_checks
from tests.fakes.bench.coserve_run import StandInBench

Row = dict[str, Any]
ROSE = ("paper-0.0", "adaptive-0.0", "paper-0.7", "adaptive-0.7")


def judged(records: CoserveRecords, *arms: str) -> dict[str, Row]:
    """The rows of these arms; intervals of all others would take their time."""
    kept = {*arms, "alone", "guest_alone", "naive_alone"}
    blocks = [block for block in records.blocks if block.arm in kept]
    rows = Analysis(replace(records, blocks=blocks), card_rules).rows()
    return {arm_of(row).name: row for row in rows}


def checks(row: Row) -> dict[str, Row]:
    return {check["name"]: check for check in row["checks"]}


@pytest.fixture(scope="module")
def unnoticed(tmp_path_factory: pytest.TempPathFactory) -> CoserveRecords:
    return read_run(StandInBench(tmp_path_factory.mktemp("run"), rounds=3).write())


@pytest.fixture(scope="module")
def rows(unnoticed: CoserveRecords) -> dict[str, Row]:
    return judged(unnoticed, "naive", *ROSE)


def test_an_unnoticed_guest_holds_and_a_naive_one_fails(rows: dict[str, Row]) -> None:
    assert rows["naive"]["verdict"] == "FAILS"
    for name in ROSE:
        assert rows[name]["verdict"] == "HOLDS", checks(rows[name])
    told = checks(rows["adaptive-0.0"])
    assert told["idle_efficiency"]["value"] == pytest.approx(0.92, rel=0.02)
    # One guest step may come before a first token: 6 ms beside a p90 of 27 ms.
    assert told["ttft_p90"]["limit"] == pytest.approx(1.05 + 0.006 / 0.027, abs=0.02)
    assert told["stop_p99_s"]["limit"] == 0.020
    assert told["stop_p99_s"]["decisive"]


def test_p99_decides_only_with_enough_requests_and_says_how_many(rows: dict[str, Row]) -> None:
    row = rows["paper-0.0"]
    check = checks(row)["ttft_p99"]
    assert (check["verdict"], check["decisive"], check["limit"]) == ("INCONCLUSIVE", False, 1.07)
    assert requests_wanted(row["host"]["requests"]) == 10_000 - row["host"]["requests"] > 0
    assert requests_wanted(10_001) == 0


def test_with_slack_lent_it_is_the_targets_that_must_hold(
    unnoticed: CoserveRecords, rows: dict[str, Row]
) -> None:
    told = checks(rows["adaptive-0.7"])
    assert told["ttft_p99_s"]["limit"] == 0.2
    assert told["tpot_p99_s"]["limit"] == 0.05
    assert "ttft_p90" not in told
    assert not told["stop_p99_s"]["decisive"]
    tight = msgspec.structs.replace(unnoticed.run, ttft_target_s=0.02)
    told = checks(judged(replace(unnoticed, run=tight), "adaptive-0.7")["adaptive-0.7"])
    assert told["ttft_p99_s"]["verdict"] == "FAILS"
    assert told["tpot_p99_s"]["verdict"] == "HOLDS"


def test_a_guest_that_goes_on_after_an_arrival_fails_and_tokens_that_differ_decide_nothing(
    tmp_path: Path,
) -> None:
    bench = StandInBench(
        tmp_path, rounds=3, busy=0.05, guest_step_s=0.06, wrong_tokens={"adaptive-0.0": 2}
    )
    row = judged(read_run(bench.write()), "adaptive-0.0")["adaptive-0.0"]
    failed = {name for name, check in checks(row).items() if check["verdict"] == "FAILS"}
    stop = checks(row)["stop_p99_s"]
    assert "stop_p99_s" in failed
    assert 0.05 < stop["value"] <= 0.06
    assert row["token_mismatches"] > 0
    assert "token_mismatches" not in checks(row)


def test_limits_are_those_that_decide_about_rose(rows: dict[str, Row]) -> None:
    found = served_checks({"rows": list(rows.values())})
    names = {check.name for check in found}
    assert {"adaptive 0 idle_efficiency", "paper 0.7 spare_efficiency"} <= names
    assert not any("naive" in name or "alone" in name or "p99 " in name for name in names)
    assert "adaptive 0 ttft_p99" not in names

import json
from pathlib import Path

import pytest

from bench.demo.report.report import verify, write_report
from tests.fakes.bench.demo_run import StandInRun

PROMISED = {
    "": "elapsed_s peak_memory_bytes cpu_s verdicts settings",
    "reward": "first_fifth last_fifth by_step",
    "heldout": "warm_start final",
    "trajectories": "started delivered lost duplicated spanning_versions revoked_mid_turn",
    "tokens": "dedicated guest continued unstamped",
    "logprob_gap": "guest dedicated continued",
    "harvest": "gain ceiling busy idle_efficiency",
    "host": "frozen leased all",
    "weights": "versions full_bytes wire_bytes density_by_step digest_failures probe_failures",
}


def test_the_report_has_every_promised_field(reported: Path) -> None:
    report = json.loads((reported / "report.json").read_text())
    for section, names in PROMISED.items():
        found = report[section] if section else report
        assert set(names.split()) <= set(found)
    latencies = {"ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s", "requests"}
    assert latencies <= set(report["host"]["leased"])
    assert {"name", "value", "ci95", "limit", "verdict", "why"} <= set(report["verdicts"][0])


def test_verify_names_each_field_that_was_changed(reported: Path) -> None:
    path = reported / "report.json"
    report = json.loads(path.read_text())
    report["harvest"]["ceiling"] *= 1.001
    report["verdicts"][0]["verdict"] = "MAYBE"
    del report["weights"]["versions"]
    report["extra"] = 1
    path.write_text(json.dumps(report))
    fields = [difference.field for difference in verify(reported)]
    assert fields == ["extra", "harvest.ceiling", "verdicts[0].verdict", "weights.versions"]


def test_verify_notices_records_changed_after_the_report(reported: Path) -> None:
    path = reported / "trajectories.jsonl"
    path.write_text(path.read_text().replace('"reward":0.0', '"reward":1.0', 1))
    fields = {difference.field for difference in verify(reported)}
    assert "reward.by_step[0]" in fields
    assert "report.md" in fields


def test_an_infinite_latency_is_null_in_json_and_still_verifies(tmp_path: Path) -> None:
    report = write_report(StandInRun(leased_failures=0.3).write(tmp_path))
    assert report["host"]["leased"]["ttft_p95_s"] == float("inf")
    assert b"Infinity" not in (tmp_path / "report.json").read_bytes()
    assert verify(tmp_path) == []


def test_idle_efficiency_compares_the_guest_only_while_it_has_enough_turns(tmp_path: Path) -> None:
    # At the ceiling the stand-in waits for turns every other second; lent under load it never does.
    found = write_report(StandInRun(idle_efficiency=0.8).write(tmp_path))["harvest"][
        "idle_efficiency"
    ]
    assert found is not None
    assert found.value == pytest.approx(0.8, rel=0.05)
    assert found.ci95 is not None
    assert found.ci95[0] < 0.8 < found.ci95[1]

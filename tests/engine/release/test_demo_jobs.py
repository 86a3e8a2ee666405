"""Two training runs on one borrowed guest with real engines: `rose demo --jobs 2`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import first_of, left_behind

# Two engines, and four minutes.
pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(480)]

MARK = "ROSE_TEST_RUN"
JOBS = ["frozen-lake-1", "frozen-lake-2"]
# The model as version 1, and steps of the policy after it.
LEAST_VERSIONS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run: its folder, its report and what it printed."""
    out = tmp_path_factory.mktemp("demo-jobs") / "run"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "rose.cli", "demo", "--jobs", "2", "--out", str(out)),
            f"--port-base={first_of(32)}",
        ],
        env={**os.environ, MARK: str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=420,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    return out, json.loads((out / "report.json").read_text()), process.stdout


def test_nothing_is_left_running(run: tuple[Path, dict[str, Any], str]) -> None:
    assert left_behind(MARK, str(run[0])) == []


def test_each_job_has_between_two_and_three_fifths_of_the_guests_time(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    assert [job["job"] for job in run[1]["jobs"]] == JOBS
    assert all(0.4 <= job["share"] <= 0.6 for job in run[1]["jobs"])
    assert run[1]["sharing"]["changes"] >= 2


def test_the_guest_goes_from_job_to_job_in_one_engine(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    assert run[1]["sharing"]["engine_starts"] == 0
    lines = (run[0] / "events.jsonl").read_text().splitlines()
    starts = [e for e in map(json.loads, lines) if e.get("state") == "healthy"]
    assert [event["replica"] for event in starts] == ["guest"]


def test_each_job_learns_from_its_own_weights_and_loses_nothing(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    for job in run[1]["jobs"]:
        assert job["weights"]["versions"] >= LEAST_VERSIONS
        assert job["trajectories"]["lost"] == job["trajectories"]["duplicated"] == 0
        assert job["trajectories"]["started"] == job["trajectories"]["delivered"]
        # Tokens of the other job's weights would not be as likely as this job's trainer says.
        assert job["logprob_gap"]["guest"] <= 0.01
        assert job["logprob_gap"]["continued"] <= 0.01
        assert job["tokens"]["dedicated"] == job["tokens"]["unstamped"] == 0


def test_every_claim_holds_and_follows_from_the_raw_records(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    assert {claim["verdict"] for claim in run[1]["verdicts"]} == {"HOLDS"}
    command = [sys.executable, "-m", "rose.cli", "demo", "verify", str(run[0])]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_the_host_served_every_request(run: tuple[Path, dict[str, Any], str]) -> None:
    served = run[1]["host"]["all"]
    assert served["requests"] > 0
    assert served["failed"] == 0


def test_the_page_and_the_last_lines_say_what_each_job_had(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    assert "Traceback" not in run[2]
    for job in JOBS:
        assert f"{job} had the guest for" in run[2]
        assert f"{job}=v" in run[2]
    assert (run[0] / "jobs.png").stat().st_size > 5_000

"""The whole demo with real engines, as a newcomer runs it: `rose demo`.

How it ends before it has begun is tested with stand-ins: test_demo_ends.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import first_of, left_behind

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

MARK = "ROSE_TEST_RUN"
MAX_MEMORY_BYTES = 8 << 30
LEAST_STEPS = 4


def _start(out: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "rose.cli", "demo", "--out", str(out)),
            f"--port-base={first_of(32)}",
        ],
        env={**os.environ, MARK: str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The quickstart: its folder, its report and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "run"
    process = _start(out)
    printed, _ = process.communicate(timeout=360)
    assert process.returncode == 0, printed
    return out, json.loads((out / "report.json").read_text()), printed


def test_nothing_is_left_running(run: tuple[Path, dict[str, Any], str]) -> None:
    assert left_behind(MARK, str(run[0])) == []


def test_no_trajectory_is_lost_or_delivered_twice(run: tuple[Path, dict[str, Any], str]) -> None:
    trajectories = run[1]["trajectories"]
    assert trajectories["lost"] == trajectories["duplicated"] == 0
    assert trajectories["started"] == trajectories["delivered"] >= LEAST_STEPS * 128
    assert trajectories["spanning_versions"] > 0


def test_every_token_is_stamped_and_as_likely_as_the_trainer_says(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    assert run[1]["tokens"]["unstamped"] == 0
    assert all(run[1]["tokens"][kind] > 0 for kind in ("guest", "dedicated", "continued"))
    assert all(gap <= 0.01 for gap in run[1]["logprob_gap"].values())


def test_every_version_is_proven_on_both_replicas(run: tuple[Path, dict[str, Any], str]) -> None:
    out, report, _ = run
    lines = (out / "activations.jsonl").read_text().splitlines()
    activations = [json.loads(line) for line in lines]
    versions = report["weights"]["versions"]
    assert versions >= LEAST_STEPS
    assert report["weights"]["digest_failures"] == report["weights"]["probe_failures"] == 0
    for replica in ("guest", "dedicated"):
        proven = {a["version"] for a in activations if a["replica"] == replica and a["probe_ok"]}
        assert len(proven) >= versions - 4, "the guest is killed near the end"


def test_turns_survive_revocations_and_a_killed_guest(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    verdicts = {claim["name"]: claim["verdict"] for claim in run[1]["verdicts"]}
    assert verdicts["faults: forced revocations mid-turn"] == "HOLDS"
    assert verdicts["faults: guest killed with SIGKILL"] == "HOLDS"
    assert set(verdicts.values()) == {"HOLDS"}


def test_the_host_served_every_request(run: tuple[Path, dict[str, Any], str]) -> None:
    served = run[1]["host"]["all"]
    assert served["requests"] > 0
    assert served["failed"] == 0


def test_it_fits_a_laptop(run: tuple[Path, dict[str, Any], str]) -> None:
    assert run[1]["peak_memory_bytes"] <= MAX_MEMORY_BYTES


def test_the_report_follows_from_the_raw_records(run: tuple[Path, dict[str, Any], str]) -> None:
    command = [sys.executable, "-m", "rose.cli", "demo", "verify", str(run[0])]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_the_last_lines_say_what_happened_and_where_the_proof_is(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    assert "were borrowed" in run[2]
    assert "rose demo --accept" in run[2]
    assert "Traceback" not in run[2]


def test_a_page_of_pictures_is_there(run: tuple[Path, dict[str, Any], str]) -> None:
    for name in ("reward.png", "host.png", "tokens.png", "wire.png"):
        assert (run[0] / name).stat().st_size > 5_000
        assert name in (run[0] / "report.md").read_text()

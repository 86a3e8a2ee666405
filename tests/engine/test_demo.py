"""The whole demo with real engines, as a person runs it: `rose demo --quick`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

MARK = "ROSE_TEST_RUN"
MAX_MEMORY_BYTES = 8 << 30


def _start(out: Path, port_base: int, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "rose.cli", "demo", "--quick", "--out", str(out)),
            *(f"--port-base={port_base}", *arguments),
        ],
        env={**os.environ, MARK: str(out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _left_behind(out: Path) -> list[str]:
    """Processes that carry the run's mark: everything that the run started inherits it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(out) and process.status() != "zombie":
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One quick run: its folder, its report and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "run"
    process = _start(out, 21_000)
    printed, _ = process.communicate(timeout=360)
    assert process.returncode in (0, 1), printed
    return out, json.loads((out / "report.json").read_text()), printed


def test_nothing_is_left_running(run: tuple[Path, dict[str, Any], str]) -> None:
    assert _left_behind(run[0]) == []


def test_no_trajectory_is_lost_or_delivered_twice(run: tuple[Path, dict[str, Any], str]) -> None:
    trajectories = run[1]["trajectories"]
    assert trajectories["lost"] == trajectories["duplicated"] == 0
    assert trajectories["started"] == trajectories["delivered"] >= 12 * 128
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
    assert versions >= 12
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
    assert verdicts["trajectories: staleness"] == "HOLDS"


def test_the_host_served_every_request(run: tuple[Path, dict[str, Any], str]) -> None:
    for arm in ("leased", "frozen"):
        assert run[1]["host"][arm]["requests"] > 0
        assert run[1]["host"][arm]["failed"] == 0


def test_it_fits_a_laptop(run: tuple[Path, dict[str, Any], str]) -> None:
    assert run[1]["peak_memory_bytes"] <= MAX_MEMORY_BYTES


def test_the_report_follows_from_the_raw_records(run: tuple[Path, dict[str, Any], str]) -> None:
    command = [sys.executable, "-m", "rose.cli", "demo", "verify", str(run[0])]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_page_of_pictures_is_there(run: tuple[Path, dict[str, Any], str]) -> None:
    for name in ("reward.png", "host.png", "tokens.png", "wire.png"):
        assert (run[0] / name).stat().st_size > 5_000
        assert name in (run[0] / "report.md").read_text()


def test_ctrl_c_while_engines_start_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = _start(out, 21_100)
    deadline_s = time.monotonic() + 60
    while not (out / "logs" / "engine-host.log").exists() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    time.sleep(6.0)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert _left_behind(out) == []


def test_an_engine_that_dies_at_start_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "no-such-model"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\0" * 16)
    process = _start(tmp_path / "run", 21_200, "--host-model", str(model))
    printed, _ = process.communicate(timeout=180)
    assert process.returncode == 2, printed
    last = printed.strip().splitlines()[-1]
    assert last.startswith("rose: ")
    assert "host" in last
    assert "Traceback" not in printed
    assert _left_behind(tmp_path / "run") == []

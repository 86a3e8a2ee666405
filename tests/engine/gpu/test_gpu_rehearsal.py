"""`make gpu ARGS=--rehearse`: the code that a card will need runs whole, on tiny engines.

Nothing of what it measures is looked at as a figure: that is what a card is for.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.coserve.plan import ARMS
from bench.coserve.rows import arm_of
from bench.gpu.machine import MARK
from tests.harness.processes import left_behind
from tests.harness.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
OTHER_VLLM = "ROSE_VLLM25_PYTHON"
DONE, CUT_OFF = ("serve60", "bursts", "update-serving"), "serve90"


@contextmanager
def rehearsal(
    tmp_path: Path, *options: str, python: str = sys.executable
) -> Iterator[subprocess.Popen[str]]:
    folders = ("--out", str(tmp_path / "results"), "--logs", str(tmp_path / "logs"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with subprocess.Popen(
        [python, "-m", "bench.gpu", "--rehearse", "--arm-s", "1", *options, *folders],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            # SIGTERM ends all that it started.
            process.terminate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=500)
    return process.returncode, out


@dataclass
class Rehearsed:
    """A rehearsal that is over."""

    folder: Path
    runner: int
    code: int
    said: str

    def result(self, name: str) -> dict[str, Any]:
        path = self.folder / "results" / "rehearsal-on-cpu" / name
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    """Four pieces with the same engines, of which one is killed in an arm of the last."""
    folder = tmp_path_factory.mktemp("rehearsal")
    log = folder / "logs" / "serve60.log"
    with rehearsal(folder, "--only", *DONE, CUT_OFF) as process:

        def in_the_last_piece() -> bool:
            assert process.poll() is None, ended(process)
            return log.is_file() and ", busy 0.9 poisson" in log.read_text()

        until(in_the_last_piece, 500, "an arm of the last piece", every_s=0.05)
        (guest,) = (
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "--served-model-name=guest" in child.cmdline() and "--" not in child.cmdline()
        )  # not the one that waits beside it to end its family
        guest.send_signal(signal.SIGKILL)
        return Rehearsed(folder, process.pid, *ended(process))


def insist_complete(run: Rehearsed, piece: str) -> None:
    record = run.result(f"{piece}.json")
    assert record["rehearsal"].endswith("says anything about a GPU")
    measured = record["measured"]
    rows = {arm_of(row): row for row in measured["rows"]}
    assert rows.keys() == set(ARMS)
    assert set(measured["order"]) == {arm.name for arm in ARMS} | {"guest_alone", "naive_alone"}
    for arm, row in rows.items():
        assert row["host"]["requests"] > 0
        assert row["host"]["failed"] == 0
        if arm.guest != "none":
            assert row["guest_tok_s"] > 0
            assert row["guest_alone_tok_s"] > 0
        if arm.guest == "rose":
            assert {check["name"] for check in row["checks"]} >= {"stop_p99_s", "host_preemptions"}
    assert len({check["name"] for check in record["checks"]}) == len(record["checks"]) > 10


def insist_updated(record: dict[str, Any]) -> None:
    measured = record["measured"]
    updates = [measured["first"], *measured["updates"]]
    assert [update["version"] for update in updates] == list(range(1, len(updates) + 1))
    for update in updates:
        assert update["digest_ok"]
        assert update["probe_ok"]
        assert 0.01 < update["changed_share"] <= 0.021
        assert 0 < update["pause_s"] < update["applied_s"]
    assert measured["pause_s"]["count"] == len(measured["updates"]) > 0
    assert measured["host"]["during"]["requests"] > 0
    assert measured["host"]["control"]["requests"] > 0
    assert measured["stamped"]["turns"] >= len(updates)
    assert measured["stamped"]["tokens_of_version"].keys() >= {str(u["version"]) for u in updates}
    assert {check["name"] for check in record["checks"]} >= {"pause p50: s", "pause most: s"}


def test_every_arm_is_gone_through_and_leaves_records_and_a_picture(run: Rehearsed) -> None:
    assert "4 pieces: 3 done, 1 failed" in run.said
    insist_complete(run, "serve60")
    insist_complete(run, "bursts")
    traffic = run.result("bursts.json")["measured"]["traffic"]
    assert traffic["trace"] == "generated"
    assert traffic["peak_per_s"] > 20
    rates = run.result("serving-rates.json")
    assert 0.6 in [rate["busy_target"] for rate in rates["rates"]]
    picture = run.folder / "results" / "rehearsal-on-cpu" / "gpu.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_update_while_serving_is_applied_proved_and_stamped(run: Rehearsed) -> None:
    record = run.result("update-serving.json")
    insist_updated(record)
    assert (run.folder / "logs" / "weights" / "tiny-guest").is_dir()


def test_an_engine_that_dies_in_an_arm_is_one_line_and_nothing_is_left(run: Rehearsed) -> None:
    assert run.code == 1
    (failed,) = (line for line in run.said.splitlines() if line.startswith("serve90  failed: "))
    assert failed.startswith("serve90  failed: engine guest ended"), failed
    assert (run.folder / "results" / "rehearsal-on-cpu" / "serve90.failed.json").is_file()
    assert not left_behind(MARK, str(run.runner))


@pytest.mark.skipif(
    OTHER_VLLM not in os.environ, reason=f"{OTHER_VLLM} names no Python with vLLM 0.25"
)
def test_the_version_beside_a_cards_torch_is_rehearsed_too(tmp_path: Path) -> None:
    with rehearsal(
        tmp_path, "--only", "serve60", "update-serving", python=os.environ[OTHER_VLLM]
    ) as process:
        run = Rehearsed(tmp_path, process.pid, *ended(process))
    assert run.code == 0, run.said
    insist_complete(run, "serve60")
    insist_updated(run.result("update-serving.json"))
    assert not left_behind(MARK, str(run.runner))

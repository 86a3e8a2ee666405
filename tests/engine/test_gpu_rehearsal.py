"""`make gpu ARGS=--rehearse`: the code that a card will need runs whole, on tiny engines.

Nothing of what it measures is looked at as a figure: that is what a card is for.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rose.bench.coserve.plan import ARMS
from rose.bench.coserve.rows import arm_of
from rose.bench.gpu.process import MARK, Order, measure_apart
from rose.bench.gpu.registry import pieces_of
from rose.bench.gpu.rehearsal import PLACE, StandInCard
from rose.bench.gpu.serve.sizes import REHEARSAL
from rose.bench.gpu.sizes import Sizes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
OTHER_VLLM = "ROSE_VLLM25_PYTHON"


@contextmanager
def rehearsal(
    tmp_path: Path, *options: str, python: str = sys.executable
) -> Iterator[subprocess.Popen[str]]:
    folders = ("--out", str(tmp_path / "results"), "--logs", str(tmp_path / "logs"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with subprocess.Popen(
        [python, "-m", "rose.bench.gpu", "--rehearse", "--arm-s", "1", *options, *folders],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            # It ends all that it started.
            process.terminate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=280)
    return process.returncode, out


def reached(process: subprocess.Popen[str], log: Path, words: str) -> None:
    """Return once the pieces' log has these words."""
    while not (log.is_file() and words in log.read_text()):
        assert process.poll() is None, ended(process)
        time.sleep(0.2)


def left_behind(runner: int) -> list[int]:
    """What pieces started and did not end."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(runner) and process.status() != "zombie":
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def result(tmp_path: Path, name: str) -> dict[str, Any]:
    path = tmp_path / "results" / "rehearsal-on-cpu" / name
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def insist_complete(tmp_path: Path, piece: str) -> None:
    record = result(tmp_path, f"{piece}.json")
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
    assert len({check["check"] for check in record["checks"]}) == len(record["checks"]) > 10


def test_a_rehearsal_goes_through_every_arm_and_leaves_records_and_a_picture(
    tmp_path: Path,
) -> None:
    with rehearsal(tmp_path, "--only", "serve60", "bursts") as process:
        code, said = ended(process)
    assert code == 0, said
    assert "2 pieces: 2 done" in said
    insist_complete(tmp_path, "serve60")
    insist_complete(tmp_path, "bursts")
    traffic = result(tmp_path, "bursts.json")["measured"]["traffic"]
    assert (traffic["trace"], traffic["peak_per_s"]) == ("generated", 67)
    rates = result(tmp_path, "serving-rates.json")
    assert [rate["busy_target"] for rate in rates["rates"]] == [0.6]
    picture = tmp_path / "results" / "rehearsal-on-cpu" / "gpu.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not left_behind(process.pid)


def test_an_engine_that_dies_in_an_arm_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    with rehearsal(tmp_path, "--only", "serve60", "--arm-rounds", "50") as process:
        reached(process, tmp_path / "logs" / "serve60.log", ", busy 0.6 poisson")
        (guest,) = (
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "--served-model-name=guest" in child.cmdline() and "--" not in child.cmdline()
        )  # not the one that waits beside it to end its family
        guest.send_signal(signal.SIGKILL)
        code, said = ended(process)
    assert code == 1
    (failed,) = (line for line in said.splitlines() if line.startswith("serve60  failed: "))
    assert failed.startswith("serve60  failed: engine guest ended"), failed
    assert (tmp_path / "results" / "rehearsal-on-cpu" / "serve60.failed.json").is_file()
    assert not left_behind(process.pid)


def test_an_engine_without_room_is_one_line_and_the_others_are_ended(tmp_path: Path) -> None:
    (card,) = StandInCard().cards()
    sizes = Sizes(serving=replace(REHEARSAL, guest_kv_bytes=1 << 50))
    order = Order(pieces_of(("serve60",)), sizes, card, 120.0, tmp_path, tmp_path)
    (answer,) = measure_apart(order, place=PLACE)
    assert answer.failed.startswith("engine guest: processes, weights and KV need ")
    assert "\n" not in answer.failed
    assert not left_behind(os.getpid())


@pytest.mark.skipif(
    OTHER_VLLM not in os.environ, reason=f"{OTHER_VLLM} names no Python with vLLM 0.25"
)
def test_the_version_beside_a_cards_torch_is_rehearsed_too(tmp_path: Path) -> None:
    with rehearsal(tmp_path, "--only", "serve60", python=os.environ[OTHER_VLLM]) as process:
        code, said = ended(process)
    assert code == 0, said
    insist_complete(tmp_path, "serve60")
    assert not left_behind(process.pid)


def test_an_update_while_serving_is_applied_proved_and_stamped(tmp_path: Path) -> None:
    python = os.environ.get(OTHER_VLLM) or sys.executable
    with rehearsal(tmp_path, "--only", "update-serving", python=python) as process:
        code, said = ended(process)
    assert code == 0, said
    record = result(tmp_path, "update-serving.json")
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
    assert {check["check"] for check in record["checks"]} >= {"pause p50: s", "pause most: s"}
    assert (tmp_path / "logs" / "weights" / "tiny-guest").is_dir()
    assert not left_behind(process.pid)

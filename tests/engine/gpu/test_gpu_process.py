"""A piece's process: whatever it does, the runner goes on and nothing of it is left."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu.__main__ import main
from bench.gpu.machine import REHEARSAL_PLACE, StandInCard
from bench.gpu.measure import MARK, Answered, PieceOrder, measure_apart, reason
from bench.gpu.pieces import REHEARSAL, PieceError, Sizes, pieces_of
from tests.fakes.bench.gpu import CARD, StandInReader
from tests.harness.processes import left_behind

pytestmark = pytest.mark.engine

HERE = str(Path(__file__).parent)
(COPY,) = pieces_of(("copy",))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def answers(logs: Path, *names: str, limit_s: float = 20.0) -> list[Answered]:
    pieces = tuple(replace(COPY, name=name) for name in names)
    order = PieceOrder(pieces, Sizes(gib=2), CARD, limit_s, logs, logs)
    return list(measure_apart(order, module="standin_measure"))


def told(logs: Path, *names: str) -> list[tuple[str, str]]:
    return [(answer.piece.name, answer.failed) for answer in answers(logs, *names)]


def test_it_gets_the_card_and_the_sizes_and_its_answer_comes_back(tmp_path: Path) -> None:
    (answer,) = answers(tmp_path / "logs", "good")
    assert answer.measured is not None
    assert Sizes.of(answer.measured["sizes"]) == Sizes(gib=2)
    assert (tmp_path / "logs" / "good.log").read_text() == "good on GPU-stand-in\n"


def test_of_pieces_that_share_a_process_each_has_an_answer(tmp_path: Path) -> None:
    assert told(tmp_path, "good", "better") == [("good", ""), ("better", "")]


def test_the_piece_in_which_a_process_ended_has_failed_and_later_ones_were_not_begun(
    tmp_path: Path,
) -> None:
    assert told(tmp_path, "good", "fails", "better") == [("good", ""), ("fails", "one line")]
    (first, good), (second, crashed) = told(tmp_path, "good", "crashes", "better")
    assert (first, good, second) == ("good", "", "crashes")
    assert crashed.startswith("its process was ended by SIGSEGV without an answer; see ")
    # A piece that was not begun for lack of time has not failed.
    assert told(tmp_path, "good", "no time left", "better") == [("good", "")]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fails", "^one line$"),
        ("crashes", "^its process was ended by SIGSEGV without an answer; see "),
        ("says nothing", "^its process ended with status 3 without an answer; see "),
        ("no time left", "^its process ended with status 0 without an answer; see "),
    ],
)
def test_a_process_that_fails_is_told_in_one_line(tmp_path: Path, name: str, why: str) -> None:
    (answer,) = answers(tmp_path, name)
    assert re.match(why, answer.failed)
    assert "\n" not in answer.failed


def test_without_a_gpu_every_piece_says_so_and_the_next_one_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bench.gpu.measure.environment_of",
        lambda card: {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    arguments = ["--out", str(tmp_path), "--logs", str(tmp_path / "logs"), "--only", "copy"]
    assert main([*arguments, "update"], lambda: StandInReader(CARD)) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if " failed: torch " in line]
    assert len(failed) == 2
    assert all(line.endswith("sees no GPU; use a Python whose torch does") for line in failed)
    assert lines[-1] == "2 pieces: 2 failed"
    assert (tmp_path / "logs" / "copy.log").stat().st_size > 0


def test_one_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.measure.GRACE_S", 0.0)
    (answer,) = answers(tmp_path, "hangs", limit_s=1.0)
    assert answer.failed.startswith("took longer than its 1 s and was ended; see ")
    child = int((tmp_path / "hangs.log").read_text().split()[-1])
    deadline_s = time.monotonic() + 5
    while _lives(child) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not _lives(child)


def test_an_engine_without_room_is_one_line_and_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_JOURNAL", str(tmp_path / "journal"))
    (tmp_path / "mute").touch()
    (card,) = StandInCard().cards()
    sizes = Sizes(serving=replace(REHEARSAL, guest_kv_bytes=1 << 50))
    order = PieceOrder(pieces_of(("serve60",)), sizes, card, 120.0, tmp_path, tmp_path)
    (answer,) = measure_apart(order, module="standin_serving_measure", place=REHEARSAL_PLACE)
    assert answer.failed.startswith("engine guest: processes, weights and KV need ")
    assert "\n" not in answer.failed
    assert not left_behind(MARK, str(os.getpid()))


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class OutOfMemoryError(RuntimeError):
    """Error with the name of torch's own."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OutOfMemoryError("Tried to allocate 9 GiB.\nmore"), "the card ran out of memory (Tried"),
        (RuntimeError("CUDA error: out of memory"), "the card ran out of memory (CUDA error"),
        (PieceError("as it is"), "as it is"),
        (ValueError("so\nand so"), "ValueError: so"),
        (KeyError(), "KeyError: no message"),
    ],
)
def test_every_error_is_one_line(error: Exception, told: str) -> None:
    assert reason(error).startswith(told)
    assert "\n" not in reason(error)

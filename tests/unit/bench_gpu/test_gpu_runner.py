"""Pieces in order: resumable, each useful by itself, and one that fails stops none."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import runner as running
from bench.gpu.measure import Answered, PieceOrder
from bench.gpu.pieces import MOST_S, PIECES, Sizes
from bench.gpu.runner import Runner
from tests.fakes.gpu import IDLE, MEASURED, StandInReader, card, usage
from tests.fakes.gpu_runs import COPY, KERNELS, UPDATE, Measuring, files, request, run, states


def test_a_piece_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    measure = Measuring(kernels="codes differ")
    outcomes = run(request(tmp_path), measure)
    assert measure.asked == ["copy", "kernels", "update"]
    assert states(outcomes) == {"copy": "done", "kernels": "failed", "update": "done"}
    assert not outcomes["kernels"].good
    assert files(tmp_path) == {"copy.json", "kernels.failed.json", "update.json"}
    failed = json.loads((tmp_path / "stand-in-gpu" / "kernels.failed.json").read_text())
    assert failed["failed"] == "codes differ"
    assert failed["environment"]["commit"] == "abc"


def test_what_this_commit_measured_is_kept_and_what_failed_is_tried_again(tmp_path: Path) -> None:
    run(request(tmp_path), Measuring(kernels="codes differ"))
    second = Measuring()
    outcomes = run(request(tmp_path), second)
    assert second.asked == ["kernels"]
    assert states(outcomes) == {"copy": "kept", "kernels": "done", "update": "kept"}
    assert files(tmp_path) == {"copy.json", "kernels.json", "update.json"}


@pytest.mark.parametrize(
    "changes", [{"revision": "abd"}, {"sizes": Sizes(gib=1)}, {"resume": False}]
)
def test_other_code_or_other_sizes_are_measured_again(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    run(request(tmp_path), Measuring())
    second = Measuring()
    run(request(tmp_path, **changes), second)
    assert second.asked == ["copy", "kernels", "update"]


def test_no_piece_begins_that_is_not_expected_to_end_within_the_budget(tmp_path: Path) -> None:
    enough = Measuring()
    run(request(tmp_path, budget_s=KERNELS.estimate_s + 1), enough)
    assert enough.asked == ["copy", "kernels", "update"]
    short = Measuring()
    left = run(request(tmp_path, budget_s=KERNELS.estimate_s - 1, revision="abd"), short)
    assert short.asked == ["copy"]
    # Not the next one that would fit: what comes later may build on what comes before.
    assert states(left) == {"copy": "done", "kernels": "left", "update": "left"}
    assert left["kernels"].good


def test_who_came_to_the_card_meanwhile_is_noticed_before_the_next_piece(tmp_path: Path) -> None:
    class Reader(StandInReader):
        def usage(self, which: Any) -> Any:
            look = super().usage(which)
            return usage(processes=(99,)) if said[-1].startswith("kernels  weight") else look

    measure = Measuring()
    said = [""]
    runner = Runner(Reader(card()), card(), request(tmp_path, pieces=(COPY, KERNELS)), measure)
    outcomes = runner.run(said.append)
    assert [outcome.state for outcome in outcomes] == ["done", "failed"]
    assert "another process is on Stand-in GPU (pid 99)" in outcomes[1].said
    assert measure.asked == ["copy"]


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (usage(used_bytes=IDLE.used_bytes + (500 << 20)), "500 MiB more in use, processes []"),
        (usage(processes=(1234,)), "0 MiB more in use, processes [1234]"),
    ],
)
def test_a_card_that_is_not_left_as_it_was_found_fails_the_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: Any, told: str
) -> None:
    monkeypatch.setattr(running, "SETTLED_S", 0.05)
    reader = StandInReader(card(), looks=[IDLE, after])
    outcomes = run(request(tmp_path, pieces=(COPY,)), Measuring(), reader)
    assert outcomes["copy"].state == "failed"
    assert told in outcomes["copy"].said


def test_a_limit_that_fails_is_no_good_outcome_even_when_kept(tmp_path: Path) -> None:
    speed = {**MEASURED["kernels"]["speed"], "diff": {"gb_s": 1.0, "share_of_copy": 0.3}}

    class Slow(Measuring):
        def __call__(self, order: PieceOrder) -> Iterator[Answered]:
            for answer in super().__call__(order):
                assert answer.measured is not None
                yield replace(answer, measured={**answer.measured, "speed": speed})

    asked = request(tmp_path, pieces=(KERNELS,))
    assert not run(asked, Slow())["kernels"].good
    kept = run(asked, Measuring())["kernels"]
    assert (kept.state, kept.good) == ("kept", False)
    assert "diff: share of copy 0.3 (limit 0.6) FAILS" in running.line_of(kept)


def test_an_update_that_is_fast_enough_alone_does_not_prove_the_whole_pause() -> None:
    (check,) = UPDATE.checks({"overwrite_s": {"p50": 0.031}})
    assert check.verdict == "INCONCLUSIVE"
    (check,) = UPDATE.checks({"overwrite_s": {"p50": 0.051}})
    assert check.verdict == "FAILS"


def test_every_piece_is_bounded_and_fits_a_large_card() -> None:
    names = ["tests", "copy", "pages", "kernels", "update"]
    names += ["serve60", "bursts", "update-serving", "serve30", "serve90"]
    assert [piece.name for piece in PIECES] == names
    for piece in PIECES:
        assert 0 < piece.takes_s(Sizes()) == piece.estimate_s <= piece.limit_s <= MOST_S < 600
        assert piece.memory(Sizes()) < 64 << 30

"""Pieces in order: resumable, each useful by itself, and one that fails stops none."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.coserve.plan import ARMS, ArmCell
from bench.gpu import loads, updating
from bench.gpu import runner as running
from bench.gpu.measure import Answered, PieceOrder
from bench.gpu.pieces import (
    MOST_S,
    PIECES,
    REQUESTS_FOR_P90,
    PieceError,
    Sizes,
    pieces_of,
    updating_checks,
)
from bench.gpu.runner import Outcome, Runner, RunRequest, folder_of, read_done
from tests.fakes.bench.gpu import IDLE, MEASURED, StandInReader, card, usage

COPY, KERNELS, UPDATE = pieces_of(("copy", "kernels", "update"))
SERVED = pieces_of(("serve60", "bursts", "serve30", "serve90"))


@dataclass
class Measuring:
    """In place of the pieces' processes: notes which were asked, and fails where told.

    most: answers of one process. change: made of each measurement.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    most: int | None = None
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda measured: measured
    orders: list[PieceOrder] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __call__(self, order: PieceOrder) -> Iterator[Answered]:
        self.orders.append(order)
        return islice(self._answers(order), self.most)

    def _answers(self, order: PieceOrder) -> Iterator[Answered]:
        for piece in order.pieces:
            self.asked.append(piece.name)
            if piece.name in self.wrong:
                yield Answered(piece, failed=self.wrong[piece.name])
                return
            yield Answered(piece, self.change(MEASURED[piece.name]))


def request(tmp_path: Path, **changes: Any) -> RunRequest:
    pieces = (COPY, KERNELS, UPDATE)
    return replace(RunRequest(pieces, Sizes(), tmp_path, tmp_path / "logs", "abc"), **changes)


def run(
    asked: RunRequest, measure: Measuring, reader: StandInReader | None = None
) -> dict[str, Outcome]:
    runner = Runner(reader or StandInReader(card()), card(), asked, measure)
    return {outcome.piece: outcome for outcome in runner.run(lambda line: None)}


def states(outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {name: outcome.state for name, outcome in outcomes.items()}


def test_a_piece_that_fails_says_why_and_is_tried_again_while_others_are_kept(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "stand-in-gpu"
    first = run(request(tmp_path), Measuring({"kernels": "codes differ"}))
    assert states(first) == {"copy": "done", "kernels": "failed", "update": "done"}
    assert not first["kernels"].good
    failed = json.loads((folder / "kernels.failed.json").read_text())
    assert (failed["failed"], failed["environment"]["commit"]) == ("codes differ", "abc")
    again = run(request(tmp_path), Measuring())
    assert states(again) == {"copy": "kept", "kernels": "done", "update": "kept"}
    assert {path.name for path in folder.iterdir()} == {"copy.json", "kernels.json", "update.json"}


@pytest.mark.parametrize(
    "changes", [{"revision": "abd"}, {"sizes": Sizes(gib=1)}, {"resume": False}]
)
def test_other_code_or_other_sizes_are_measured_again(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    run(request(tmp_path, pieces=(COPY,)), Measuring())
    second = Measuring()
    run(request(tmp_path, pieces=(COPY,), **changes), second)
    assert second.asked == ["copy"]


def test_a_record_says_which_commit_was_measured_on_which_card(tmp_path: Path) -> None:
    run(request(tmp_path, pieces=(KERNELS,)), Measuring())
    record = read_done(folder_of(tmp_path, "Stand-in GPU"), "kernels")
    assert record is not None
    environment, card = record["environment"], record["environment"]["card"]
    assert environment["commit"] == "abc"
    assert (card["name"], card["driver"], card["cuda"]) == ("Stand-in GPU", "580.00", "13.0")
    assert (card["power_limit_w"], environment["before"]["sm_mhz"]) == (700, 345)
    assert environment["versions"].keys() >= {"torch", "triton", "vllm", "cuda-bindings"}
    assert record["during"].keys() >= {"sm_mhz", "memory_mhz", "power_w", "slowed"}
    assert record["measured"] == MEASURED["kernels"]
    assert [check["verdict"] for check in record["checks"]] == ["HOLDS", "HOLDS"]


@pytest.mark.parametrize(
    ("spent_s", "budget_s", "begun"),
    [
        (1.0, KERNELS.estimate_s + 99, {"copy", "kernels", "update"}),
        (100.0, KERNELS.estimate_s + 99, {"copy"}),
        # The next one that would fit may build on what comes before it.
        (0.0, KERNELS.estimate_s - 1, {"copy"}),
    ],
)
def test_no_piece_begins_that_is_not_expected_to_end_within_the_budget(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spent_s: float,
    budget_s: float,
    begun: set[str],
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def spend(measured: dict[str, Any]) -> dict[str, Any]:
        now_s[0] += spent_s
        return measured

    outcomes = run(request(tmp_path, budget_s=budget_s), Measuring(change=spend))
    assert {name for name, state in states(outcomes).items() if state == "done"} == begun
    assert all(outcome.good for outcome in outcomes.values())


@pytest.mark.parametrize(
    ("measure", "asked"),
    [
        (Measuring(most=2), [["serve60", "bursts", "serve30", "serve90"], ["serve30", "serve90"]]),
        (
            Measuring({"bursts": "engine guest ended"}),
            [["serve60", "bursts", "serve30", "serve90"], ["serve30", "serve90"]],
        ),
    ],
    ids=["has time for two", "fails at the second"],
)
def test_pieces_of_a_group_share_a_process_and_those_left_get_another_one(
    tmp_path: Path, measure: Measuring, asked: list[list[str]]
) -> None:
    outcomes = run(request(tmp_path, pieces=SERVED), measure)
    assert [[piece.name for piece in order.pieces] for order in measure.orders] == asked
    assert states(outcomes) == {
        piece.name: "failed" if piece.name in measure.wrong else "done" for piece in SERVED
    }


def test_a_group_has_what_is_left_of_the_budget_and_never_more_than_a_call(tmp_path: Path) -> None:
    measure = Measuring()
    run(request(tmp_path, pieces=SERVED, budget_s=400.0), measure)
    run(request(tmp_path, pieces=SERVED, resume=False), measure)
    first, second = (order.seconds for order in measure.orders)
    assert 390 < first <= 400
    assert second == MOST_S
    tight = run(request(tmp_path, pieces=SERVED, resume=False, budget_s=200.0), measure)
    assert set(states(tight).values()) == {"left"}


def test_who_came_to_the_card_meanwhile_is_noticed_before_the_next_piece(tmp_path: Path) -> None:
    class Reader(StandInReader):
        def usage(self, which: Any) -> Any:
            look = super().usage(which)
            return usage(processes=(99,)) if said[-1].startswith("kernels  weight") else look

    said = [""]
    runner = Runner(Reader(card()), card(), request(tmp_path, pieces=(COPY, KERNELS)), Measuring())
    outcomes = runner.run(said.append)
    assert [outcome.state for outcome in outcomes] == ["done", "failed"]
    assert "another process is on Stand-in GPU (pid 99)" in outcomes[1].said


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


def test_a_limit_that_fails_is_no_good_outcome_even_when_kept_but_of_a_rehearsal(
    tmp_path: Path,
) -> None:
    speed = MEASURED["kernels"]["speed"] | {"diff": {"gb_s": 1.0, "share_of_copy": 0.3}}
    slow = Measuring(change=lambda measured: measured | {"speed": speed})
    asked = request(tmp_path, pieces=(KERNELS,))
    assert not run(asked, slow)["kernels"].good
    kept = run(asked, Measuring())["kernels"]
    assert (kept.state, kept.good) == ("kept", False)
    assert "diff: share of copy 0.3 (limit 0.6) FAILS" in running.line_of(kept)
    rehearsed = run(replace(asked, rehearsal=True, resume=False), slow)["kernels"]
    assert rehearsed.good
    assert rehearsed.record is not None
    assert rehearsed.record["rehearsal"].startswith("a rehearsal on CPUs")


def updated(pause_s: float, most_s: float, ratio: float, requests: int) -> list[str]:
    host: dict[str, Any] = {name: {"requests": requests} for name in ("during", "control")}
    ratios = {"ratio": {"ttft_p90_s": ratio, "tpot_p90_s": 1.0}}
    pause = {"p50": pause_s, "most": most_s}
    return [c.verdict for c in updating_checks({"pause_s": pause, "host": host | ratios})]


def test_limits_of_an_update() -> None:
    assert updated(0.049, 0.051, 1.0, 10) == ["HOLDS", "FAILS", "HOLDS", "HOLDS"]
    # Few requests do not decide what users see.
    assert updated(0.01, 0.01, 1.2, REQUESTS_FOR_P90 - 1)[2] == "INCONCLUSIVE"
    assert updated(0.01, 0.01, 1.2, REQUESTS_FOR_P90)[2] == "FAILS"
    # An update that is fast enough alone does not prove the whole pause.
    for p50_s, verdict in ((0.031, "INCONCLUSIVE"), (0.051, "FAILS")):
        (check,) = UPDATE.checks({"overwrite_s": {"p50": p50_s}})
        assert check.verdict == verdict


def test_every_piece_is_bounded_and_fits_a_large_card() -> None:
    for piece in PIECES:
        assert 0 < piece.takes_s(Sizes()) == piece.estimate_s <= piece.limit_s <= MOST_S < 600
        assert piece.memory(Sizes()) < 64 << 30


@pytest.mark.parametrize(("until_s", "most", "played"), [(200.0, 9, 2), (0.0, 9, 1), (999.0, 3, 3)])
def test_rounds_go_on_while_the_longest_so_far_would_still_end_in_time(
    monkeypatch: pytest.MonkeyPatch, until_s: float, most: int, played: int
) -> None:
    """A round takes 90 s, and its analysis some; one is played however late it is."""
    now_s = [0.0]
    monkeypatch.setattr(loads, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def play(block: Any) -> Any:
        now_s[0] += 10.0
        numbers = {"round": block.round, "segment": 0, "guest_tokens": 0, "duration_s": 10.0}
        return SimpleNamespace(arm=block.arm.name, **numbers)

    async def nothing(*_: object) -> list[Any]:
        return []

    session: Any = SimpleNamespace(
        play=play, capacity_rps=nothing, rows=nothing, start_s=0.0, sizes=loads.ServingSizes()
    )
    cell = ArmCell(0.6, "poisson", 7.0)
    measured = asyncio.run(loads._measured(session, cell, range(most), until_s))
    assert measured["rounds"] == played
    assert len(measured["order"]) == played * (len(ARMS) + 2)


@pytest.mark.parametrize("stamps", [[0, 0], [0, 1], []])
async def test_a_guest_that_stamps_the_old_version_after_an_update_fails_the_piece(
    stamps: list[int],
) -> None:
    async def turn() -> list[int]:
        return stamps

    with pytest.raises(PieceError, match=r"a turn after version 1 is stamped \["):
        await updating._insist_stamped(SimpleNamespace(turn=turn), {"version": 1})  # type: ignore[arg-type]

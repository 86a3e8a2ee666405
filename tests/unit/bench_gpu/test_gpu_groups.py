"""Pieces that share a process: begun once, kept one by one, left or begun again together."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from bench.gpu.measure import Answered, PieceOrder
from bench.gpu.pieces import MOST_S, pieces_of
from tests.fakes.gpu import MEASURED
from tests.fakes.gpu_runs import COPY, Measuring, request, run, states

SERVED = pieces_of(("serve60", "bursts", "serve30", "serve90"))


def test_pieces_of_a_group_share_a_process_and_those_left_get_another_one(tmp_path: Path) -> None:
    class Short(Measuring):
        """Has time for two."""

        def __call__(self, order: PieceOrder) -> Iterator[Answered]:
            return islice(super().__call__(order), 2)

    measure = Short()
    outcomes = run(request(tmp_path, pieces=(COPY, *SERVED)), measure)
    assert states(outcomes) == dict.fromkeys(["copy", *(p.name for p in SERVED)], "done")
    asked = [[piece.name for piece in order.pieces] for order in measure.orders]
    assert asked == [["copy"], ["serve60", "bursts", "serve30", "serve90"], ["serve30", "serve90"]]


def test_a_piece_that_fails_ends_its_process_and_the_rest_of_the_group_gets_a_new_one(
    tmp_path: Path,
) -> None:
    measure = Measuring(bursts="engine guest ended")
    outcomes = run(request(tmp_path, pieces=SERVED), measure)
    assert states(outcomes) == {
        "serve60": "done", "bursts": "failed", "serve30": "done", "serve90": "done",
    }  # fmt: skip
    assert [len(order.pieces) for order in measure.orders] == [4, 2]
    again = Measuring()
    run(request(tmp_path, pieces=SERVED), again)
    assert again.asked == ["bursts"]


def test_a_group_has_what_is_left_of_the_budget_and_never_more_than_a_call(tmp_path: Path) -> None:
    measure = Measuring()
    run(request(tmp_path, pieces=SERVED, budget_s=400.0), measure)
    run(request(tmp_path, pieces=SERVED, resume=False), measure)
    first, second = (order.seconds for order in measure.orders)
    assert 390 < first <= 400
    assert second == MOST_S
    tight = run(request(tmp_path, pieces=SERVED, resume=False, budget_s=200.0), measure)
    assert states(tight) == dict.fromkeys(("serve60", "bursts", "serve30", "serve90"), "left")


def test_a_rehearsal_is_marked_and_no_limit_of_it_fails(tmp_path: Path) -> None:
    class Slow(Measuring):
        def __call__(self, order: PieceOrder) -> Iterator[Answered]:
            rows = [{**row} for row in MEASURED["serve60"]["rows"]]
            for row in rows:
                row["checks"] = [check | {"verdict": "FAILS"} for check in row["checks"]]
            yield Answered(order.pieces[0], {**MEASURED["serve60"], "rows": rows})

    asked = request(tmp_path, pieces=SERVED[:1])
    assert not run(asked, Slow())["serve60"].good
    rehearsed = run(replace(asked, rehearsal=True, resume=False), Slow())["serve60"]
    assert rehearsed.good
    assert rehearsed.record is not None
    assert rehearsed.record["rehearsal"].startswith("a rehearsal on CPUs")

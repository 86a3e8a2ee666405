"""Decisions of benchmarks on which a published figure rests, one table for each."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.coserve.busy_hold import HostBusyHold, limit_of
from bench.coserve.plan import ARMS, ArmCell, fit_rounds, rounds_wanted
from bench.gpu import loads, updating
from bench.gpu import runner as running
from bench.gpu.measure import Answered, PieceOrder
from bench.gpu.pieces import PieceError
from bench.gpu.runner import folder_of, read_done
from elastic_scheduler.capacity.policy import MaxHostBusy
from tests.fakes.gpu import MEASURED
from tests.fakes.gpu_runs import KERNELS, Measuring, request, run, states

TICK_S = 0.02


def test_a_record_says_which_commit_was_measured_on_which_card(tmp_path: Path) -> None:
    outcomes = run(request(tmp_path), Measuring())
    assert states(outcomes) == dict.fromkeys(("copy", "kernels", "update"), "done")
    record = read_done(folder_of(tmp_path, "Stand-in GPU"), "kernels")
    assert record is not None
    environment, card = record["environment"], record["environment"]["card"]
    assert environment["commit"] == "abc"
    assert (card["name"], card["driver"], card["cuda"]) == ("Stand-in GPU", "580.00", "13.0")
    assert (card["power_limit_w"], environment["before"]["sm_mhz"]) == (700, 345)
    assert environment["versions"].keys() >= {"torch", "triton", "vllm", "cuda-bindings"}
    assert environment["measured_at"].endswith("+00:00")
    assert record["during"].keys() >= {"sm_mhz", "memory_mhz", "power_w", "slowed"}
    assert record["measured"] == MEASURED["kernels"]
    assert [check["verdict"] for check in record["checks"]] == ["HOLDS", "HOLDS"]


@pytest.mark.parametrize(
    ("spent_s", "begun"), [(1.0, {"copy", "kernels", "update"}), (100.0, {"copy"})]
)
def test_time_that_was_spent_counts_against_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spent_s: float, begun: set[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    class Slow(Measuring):
        def __call__(self, order: PieceOrder) -> Iterator[Answered]:
            now_s[0] += spent_s
            return super().__call__(order)

    outcomes = run(request(tmp_path, budget_s=KERNELS.estimate_s + 99), Slow())
    assert {name for name, state in states(outcomes).items() if state == "done"} == begun


@pytest.mark.parametrize(
    ("played", "lent"),
    [
        ([(0.3, 60.0)], 1.0),
        ([(0.6, 60.0)], 1.0),
        ([(0.8, 30.0)], 1.0),
        ([(0.95, 15.0), (0.8, 15.0)], 0.0),
        ([(0.95, 15.0), (0.5, 15.0), (0.8, 15.0)], 1.0),
    ],
    ids=["light", "medium", "below the limit", "still held between", "lent again between"],
)
def test_between_the_thresholds_of_a_busy_host_a_hold_stays_as_it_is(
    played: list[tuple[float, float]], lent: float
) -> None:
    hold, now_s, busy_s, shares = HostBusyHold(limit_of(0.85)), 100.0, 0.0, list[float]()
    for busy, seconds in played:
        hold.begin("one")
        ticks, count = round(seconds / TICK_S), 0
        for _ in range(ticks):
            now_s, busy_s = now_s + TICK_S, busy_s + TICK_S * busy
            count += hold.lends(round(busy_s * 1e9), now_s)
        hold.end()
        shares.append(count / ticks)
    assert shares[-1] == lent


def test_another_limit_keeps_the_policys_hysteresis() -> None:
    assert limit_of(0.85) == MaxHostBusy()
    assert limit_of(1.0) is None
    lower = limit_of(0.5)
    assert lower is not None
    assert lower.resume < lower.share == 0.5


@pytest.mark.parametrize(("budget_s", "rounds"), [(2_000, [10, 3]), (900, [6, 3]), (1, [3, 3])])
def test_a_plan_that_is_too_long_loses_the_rounds_of_its_longest_cells(
    budget_s: float, rounds: list[int]
) -> None:
    cells = [ArmCell(0.3, "poisson", 5.0), ArmCell(0.9, "poisson", 50.0)]
    wanted = [rounds_wanted(cell, 20, 1_000, 3) for cell in cells]
    assert wanted == [10, 3]
    assert fit_rounds(wanted, 100, budget_s, 3) == rounds


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


@pytest.mark.parametrize(
    ("stamps", "fails"), [([1, 1], False), ([0, 0], True), ([0, 1], True), ([], True)]
)
async def test_a_guest_that_stamps_the_old_version_after_an_update_fails_the_piece(
    stamps: list[int], fails: bool
) -> None:
    async def turn() -> list[int]:
        return stamps

    turns: Any = SimpleNamespace(turn=turn)
    if not fails:
        await updating._insist_stamped(turns, {"version": 1})
        return
    with pytest.raises(PieceError, match=r"a turn after version 1 is stamped \["):
        await updating._insist_stamped(turns, {"version": 1})

"""In the benchmark the scheduler's own gate decides beside which host a guest is held."""

from pathlib import Path
from typing import Any

import pytest

from bench.coserve.busy_hold import HostBusyHold, limit_of
from bench.coserve.records import read_run
from bench.coserve.result import build_result, render
from bench.coserve.rows import arm_of
from elastic_scheduler.capacity import CapacityNote
from tests.fakes.coserve_run import StandInBench

TICK_S = 0.02


class Hosts:
    """One host that is loaded for a while, and the guard that asks 50 times a second."""

    def __init__(self, share: float = 0.85) -> None:
        self.notes: list[CapacityNote] = []
        self.hold = HostBusyHold(limit_of(share), self.notes.append)
        self.now_s = 100.0
        self.busy_s = 0.0

    def play(self, load: str, busy: float, seconds: float) -> float:
        """Share of a block in which the guest was lent."""
        self.hold.begin(load)
        lent = self._ticks(busy, seconds)
        self.hold.end()
        return lent

    def _ticks(self, busy: float, seconds: float) -> float:
        lent = 0
        ticks = round(seconds / TICK_S)
        for _ in range(ticks):
            self.now_s += TICK_S
            self.busy_s += TICK_S * busy
            lent += self.hold.lends(round(self.busy_s * 1e9), self.now_s)
        return lent / ticks


def test_a_host_that_works_nine_tenths_of_the_time_is_held_once_a_window_was_seen() -> None:
    hosts = Hosts()
    lent = hosts.play("0.9", 0.9, 20.0)
    assert 0.5 <= lent <= 0.65
    assert [note.event for note in hosts.notes if note.event == "capacity_held"]


def test_a_hold_lives_on_under_its_load_whatever_is_played_between() -> None:
    hosts = Hosts()
    hosts.play("0.9", 0.9, 8.0)
    assert hosts.play("0.3", 0.3, 8.0) == 1.0
    hosts.play("0.9", 0.9, 8.0)
    assert hosts.play("0.3", 0.3, 8.0) == 1.0
    assert hosts.play("0.9", 0.9, 8.0) == 0.0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "no limit"),
        ({"max_host_busy": 1.0}, "no limit"),
        ({"max_host_busy": 0.85}, "0.85 over 10 s; held from there on, lent again below 0.7"),
    ],
)
def test_the_table_says_the_limit_and_how_long_each_guest_was_held(
    tmp_path: Path, settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.compare.bootstrap.RESAMPLES", 100)
    bench = StandInBench(tmp_path / "run", rounds=1, settings=settings, held_arm="paper-0.0")
    result = build_result(read_run(bench.write()))
    held = {arm_of(row).name: row["held"] for row in result["rows"]}
    assert (held["paper-0.0"], held["adaptive-0.0"], held["alone"]) == (1.0, 0.0, None)
    page = render(result)
    assert f"max host busy: {told}" in page
    assert " held " in page.splitlines()[0]

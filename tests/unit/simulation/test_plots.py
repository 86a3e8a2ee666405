"""Pictures are drawn of any result, and say what to install where matplotlib is missing."""

import sys
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.simulation import plots
from rose.simulation.plots import PICTURES, save_plots
from rose.simulation.results import (
    Latencies,
    Percentiles,
    RunResult,
    SloSlice,
    StepResult,
    UseSlice,
)

NONE = Percentiles(0, 0.0, 0.0, 0.0, 0.0, 0.0)
SOME = Percentiles(9, 2.0, 1.0, 3.0, 4.0, 5.0)
EMPTY = RunResult("s", "rose", 0, 0.0, (), 0.0, 0.0, NONE, NONE, None, (), 0.0, 0.0, 0.0)
FULL = RunResult(
    "s", "fixed", 0, 60.0, (StepResult(0, 0.0, 50.0, 30.0, 15.0, 5.0, 8, 100, 0, 200, 0),),
    4.0, 72.0, SOME, SOME,
    Latencies(40, 39, SOME, SOME, (SloSlice(0.0, 25, 25), SloSlice(10.0, 15, 14))),
    (UseSlice(0.0, 0.5, 0.0, 0.9, 0.0), UseSlice(10.0, 0.4, 0.0, 0.8, 1.0)), 0.6, 0.0, 0.0,
)  # fmt: skip


def test_every_picture_is_drawn_also_of_a_run_that_did_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "DPI", 20)
    paths = save_plots([FULL, EMPTY], tmp_path / "plots")
    assert {path.name for path in paths} == set(PICTURES)
    assert all(path.stat().st_size > 500 for path in paths)


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"rose-rollout\[simulation\]"):
        save_plots([FULL], tmp_path)

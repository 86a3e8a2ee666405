from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from bench.coserve.calibration import RateSearch
from bench.coserve.plan import (
    ARMS,
    Cell,
    make_rounds,
    quick_settings,
)
from bench.coserve.run import _prepare
from rose.errors import ConfigError

CELLS = [Cell(0.3, "poisson", 5.0), Cell(0.9, "bursty", 30.0)]


def test_every_arm_of_a_round_replays_the_same_segment_in_another_order_each_time() -> None:
    blocks = [b for b in make_rounds(CELLS, [3, 2], 20, 5, seed=0) if b.cell]
    rounds = [list(group) for _, group in groupby(blocks, key=lambda b: (b.cell, b.round))]
    assert len(rounds) == 5
    for played in rounds:
        assert {b.arm for b in played} == set(ARMS)
        assert len({b.segment for b in played}) == 1
    assert len({tuple(b.arm.name for b in played) for played in rounds}) > 1
    assert len({played[0].segment for played in rounds}) == 5


@pytest.mark.parametrize("target", [0.3, 0.6, 0.9])
def test_the_rate_search_finds_a_batching_hosts_rate_in_a_few_tries(target: float) -> None:
    search = RateSearch(target, request_s=0.08)
    while not search.found and len(search.tries) < 8:
        rate = search.rate_per_s
        # Requests get cheaper as they share steps.
        search.measured(rate, 1 - pow(2.718281828, -rate * 0.08 / (1 + 0.02 * rate)))
    assert search.found
    assert len(search.tries) <= 4


def test_a_folder_with_files_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    (tmp_path / "blocks.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        _prepare(tmp_path)
    (tmp_path / "thesis.tex").unlink()
    (tmp_path / "models").mkdir()
    _prepare(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"models", "logs"}


@pytest.mark.parametrize(
    "wrong",
    [{"busy_targets": (1.2,)}, {"ttft_target_s": 0.5}, {"trace": Path("none.csv")}],
)
def test_settings_that_cannot_run_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        quick_settings(tmp_path, **wrong)

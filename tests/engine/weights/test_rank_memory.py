"""Ranks of a node over gloo: the checkpoint is in memory once, however many they are."""

from collections.abc import Sequence

import pytest

from bench.weights.__main__ import rank_checks
from bench.weights.ranks import SIZES, rank_memory

pytestmark = [pytest.mark.engine, pytest.mark.starts_others]


@pytest.mark.parametrize(
    "sizes", [(2,), pytest.param(SIZES, marks=pytest.mark.nightly)], ids=["two", "all"]
)
def test_all_ranks_together_hold_little_more_than_the_checkpoint(sizes: Sequence[int]) -> None:
    rows = rank_memory(seed=0, sizes=sizes)
    assert [row["ranks"] for row in rows] == list(sizes)
    checks = rank_checks(rows)
    assert len(checks) == 3 * len(sizes)
    assert [check for check in checks if check.verdict != "HOLDS"] == []


def test_ranks_that_each_keep_a_copy_are_found() -> None:
    row = {"ranks": 2, "read": 2.01, "decoded": 2.1, "active": 1.0, "decodes": 2}
    verdicts = [check.verdict for check in rank_checks([row])]
    assert verdicts == ["FAILS", "HOLDS", "FAILS"]

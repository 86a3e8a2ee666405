from itertools import groupby

import pytest

from bench.coserve.calibration import RateSearch
from bench.coserve.plan import (
    ARMS,
    ArmCell,
    make_rounds,
)

CELLS = [ArmCell(0.3, "poisson", 5.0), ArmCell(0.9, "bursty", 30.0)]


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

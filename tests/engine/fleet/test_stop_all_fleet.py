"""`rose stop-all` over a hundred nodes ends by `reclaimDeadline`, and names the silent ones."""

from pathlib import Path

import pytest

from bench.micro.stop_all import DEADLINE_S, measure

pytestmark = pytest.mark.engine


async def test_a_hundred_nodes_are_held_in_time_and_three_silent_ones_named(tmp_path: Path) -> None:
    [row] = await measure(nodes=100, silent=3, rounds=1, folder=tmp_path)
    assert (row.held, row.named, row.exit_code) == (97, True, 3)
    assert row.took_s <= DEADLINE_S
    assert row.slowest_ms <= 1e3 * DEADLINE_S

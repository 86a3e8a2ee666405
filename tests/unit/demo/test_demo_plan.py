from hypothesis import given
from hypothesis import strategies as st

from bench.demo.plan import (
    BLOCK_S,
    PAIRS,
    accept_plan,
)

STEPS = 60


@given(seed=st.integers(0, 1000))
def test_both_arms_of_a_pair_replay_the_same_arrivals_side_by_side(seed: int) -> None:
    plan = accept_plan(seed, STEPS)
    for pair in range(PAIRS):
        blocks = [block for block in plan if block.pair == pair]
        assert sorted(block.arm for block in blocks) == ["frozen", "leased"]
        assert blocks[0].segment == blocks[1].segment
        assert [block.seconds for block in blocks] == [BLOCK_S, BLOCK_S]
        assert blocks[1].block - blocks[0].block == 1


@given(seed=st.integers(0, 1000))
def test_as_many_pairs_begin_leased_as_frozen(seed: int) -> None:
    plan = accept_plan(seed, STEPS)
    first = {block.pair: block.arm for block in reversed(plan) if block.pair is not None}
    leased_first = sum(arm == "leased" for arm in first.values())
    assert abs(2 * leased_first - PAIRS) <= 1

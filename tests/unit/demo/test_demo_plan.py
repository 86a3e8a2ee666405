from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.demo.plan import make_plan
from rose.errors import RoseError


@given(seed=st.integers(0, 1000), steps=st.integers(8, 120), quick=st.booleans())
def test_a_plan_runs_exactly_the_steps_asked_for(seed: int, steps: int, quick: bool) -> None:
    if not quick and steps < 16:
        return
    plan = make_plan(seed, steps, quick=quick)
    assert plan.steps == steps
    assert [block.block for block in plan.blocks] == list(range(len(plan.blocks)))


@given(seed=st.integers(0, 1000), steps=st.integers(16, 160))
def test_both_arms_of_a_pair_replay_the_same_arrivals_side_by_side(seed: int, steps: int) -> None:
    plan = make_plan(seed, steps)
    for pair in range(plan.pairs):
        blocks = [block for block in plan.blocks if block.pair == pair]
        assert sorted(block.arm for block in blocks) == ["frozen", "leased"]
        assert blocks[0].segment == blocks[1].segment
        assert blocks[0].steps == blocks[1].steps
        assert blocks[1].block - blocks[0].block == 1


@given(seed=st.integers(0, 1000), steps=st.integers(16, 160))
def test_as_many_pairs_begin_leased_as_frozen(seed: int, steps: int) -> None:
    plan = make_plan(seed, steps)
    first = {block.pair: block.arm for block in reversed(plan.blocks) if block.pair is not None}
    leased_first = sum(arm == "leased" for arm in first.values())
    assert abs(2 * leased_first - plan.pairs) <= 1


def test_the_order_inside_pairs_depends_on_the_seed_alone() -> None:
    orders = {tuple(b.arm for b in make_plan(seed, 64).blocks) for seed in range(20)}
    assert len(orders) > 3
    assert make_plan(7, 64) == make_plan(7, 64)


def test_the_default_plan_has_six_pairs_three_ceilings_and_ends_in_the_storm() -> None:
    plan = make_plan(0, 64)
    arms = [block.arm for block in plan.blocks]
    assert plan.pairs == 6
    assert arms.count("ceiling") == 3
    assert [block.storm for block in plan.blocks] == [False] * (len(arms) - 1) + [True]
    assert all(block.segment is None for block in plan.blocks if block.arm == "ceiling")
    # Not before the first pair, and never two in a row.
    ceilings = [block.block for block in plan.blocks if block.arm == "ceiling"]
    assert min(b - a for a, b in pairwise(ceilings)) > 2
    assert ceilings[0] > 1


def test_a_quick_plan_still_holds_pairs_ceilings_and_the_storm() -> None:
    plan = make_plan(0, 12, quick=True)
    assert plan.pairs == 3
    assert {block.arm for block in plan.blocks} == {"leased", "frozen", "ceiling", "unmeasured"}


def test_too_few_steps_are_refused_with_the_least_number() -> None:
    with pytest.raises(RoseError, match="more than"):
        make_plan(0, 8)
    with pytest.raises(RoseError, match="at least 8"):
        make_plan(0, 3)

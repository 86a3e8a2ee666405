from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.demo.cli import CONTROLS, Control, DemoSettings
from bench.demo.plan import (
    BLOCK_S,
    PAIRS,
    accept_plan,
    control_plan,
    plan_of,
    quickstart_plan,
    sharing_plan,
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


def test_the_order_inside_pairs_depends_on_the_seed_alone() -> None:
    orders = {tuple(b.arm for b in accept_plan(seed, STEPS)) for seed in range(20)}
    assert len(orders) > 3
    assert accept_plan(7, STEPS) == accept_plan(7, STEPS)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_is_shorter_than_what_it_controls(control: Control) -> None:
    accepted, shown = accept_plan(0, STEPS), control_plan(0, control)
    assert sum(block.seconds for block in shown) < sum(b.seconds for b in accepted)
    assert max(block.until_step for block in shown) < STEPS
    assert plan_of(DemoSettings(Path("out"), accept=True, control=control)) == shown


def test_the_settings_choose_the_plan() -> None:
    assert plan_of(DemoSettings(Path("out"), jobs=2)) == sharing_plan()
    assert plan_of(DemoSettings(Path("out"))) == quickstart_plan()
    assert plan_of(DemoSettings(Path("out"), accept=True, seed=3)) == accept_plan(3, STEPS)

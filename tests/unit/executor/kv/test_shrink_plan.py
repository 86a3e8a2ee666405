"""Granules that go, requests that go with them, and the cap that counts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import GateLimits, Grant, GrantMode
from executor.kv.shrink_plan import (
    NO_CAP,
    Granules,
    GranuleUse,
    Rollout,
    Shrink,
    cap_in_force,
    granules_over,
    plan_growth,
    plan_shrink,
)

MS = 1_000_000
NOW_NS = 1_000 * MS
LIMITS = GateLimits()
LIVE = Grant(GrantMode.RUN, 64, 4, 8, heartbeat_ns=NOW_NS, expiry_ns=NOW_NS + 500 * MS)
EXPIRED = replace(LIVE, expiry_ns=NOW_NS - 1)


def uses_of(granules: Granules, owned: set[int], cached: set[int]) -> list[GranuleUse]:
    return [
        GranuleUse(
            granule,
            sum(block in owned for block in granules.blocks_of(granule)),
            sum(block in cached for block in granules.blocks_of(granule)),
        )
        for granule in range(granules.count)
    ]


@st.composite
def pools(draw: st.DrawFn) -> tuple[Granules, list[Rollout], set[int], list[GranuleUse]]:
    granules = Granules(draw(st.integers(2, 60)), draw(st.integers(1, 8)))
    block = st.integers(1, granules.blocks - 1)
    rollouts = [
        Rollout(f"r{number}", draw(st.integers(0, 500)), draw(st.sets(block, max_size=12)))
        for number in range(draw(st.integers(0, 6)))
    ]
    theirs = set[int]().union(*(rollout.blocks for rollout in rollouts))
    pinned = draw(st.sets(block, max_size=3)) - theirs
    cached = draw(st.sets(block, max_size=20)) - theirs - pinned
    return granules, rollouts, pinned, uses_of(granules, theirs | pinned, cached)


@given(pools(), st.integers(1, 70))
def test_a_shrink_takes_what_it_may_and_frees_what_it_takes(
    pool: tuple[Granules, list[Rollout], set[int], list[GranuleUse]], count: int
) -> None:
    granules, rollouts, pinned, uses = pool
    plan = plan_shrink(count, granules, uses, lambda: rollouts)
    assert len(set(plan.granules)) == len(plan.granules) <= count
    assert granules.of(0) not in plan.granules
    gone = set(plan.preempt)
    left = pinned.union(*(r.blocks for r in rollouts if r.request_id not in gone))
    assert all(left.isdisjoint(granules.blocks_of(granule)) for granule in plan.granules)
    takeable = {
        granule
        for granule in range(1, granules.count)
        if pinned.isdisjoint(granules.blocks_of(granule))
    }
    assert len(plan.granules) == min(count, len(takeable)), "as many as asked for, if there are any"


@given(pools(), st.integers(1, 70))
def test_requests_are_preempted_only_when_everything_unused_is_gone(
    pool: tuple[Granules, list[Rollout], set[int], list[GranuleUse]], count: int
) -> None:
    granules, rollouts, _, uses = pool
    plan = plan_shrink(count, granules, uses, lambda: rollouts)
    unused = {use.granule: use.cached for use in uses if use.used == 0 and use.granule}
    taken_unused = [granule for granule in plan.granules if granule in unused]
    assert not plan.preempt or len(taken_unused) == len(unused)
    for rollout in rollouts:
        if rollout.request_id in plan.preempt:
            homes = {granules.of(block) for block in rollout.blocks}
            assert homes & set(plan.granules), "nobody is preempted for nothing"
    spared = [unused[granule] for granule in unused if granule not in taken_unused]
    assert all(unused[g] <= cached for g in taken_unused for cached in spared)


def test_free_then_cached_then_the_cheapest_rollouts() -> None:
    granules = Granules(blocks=20, granule_blocks=4)
    rollouts = [Rollout("long", 300, {8, 9}), Rollout("short", 20, {12})]
    uses = [
        GranuleUse(0, 3, 0),
        GranuleUse(1, 0, 2),
        GranuleUse(2, 2, 0),
        GranuleUse(3, 1, 0),
        GranuleUse(4, 0, 0),
    ]
    order = [plan_shrink(count, granules, uses, lambda: rollouts) for count in (1, 2, 3, 4, 5)]
    assert order == [
        Shrink((4,)),
        Shrink((4, 1)),
        Shrink((4, 1, 3), ("short",)),
        Shrink((4, 1, 3, 2), ("short", "long")),
        Shrink((4, 1, 3, 2), ("short", "long")),
    ]


def test_a_cheap_rollout_that_would_free_nothing_stays() -> None:
    granules = Granules(blocks=12, granule_blocks=4)
    rollouts = [Rollout("cheap", 10, {4}), Rollout("dear", 900, {5}), Rollout("middle", 400, {8})]
    uses = uses_of(granules, {4, 5, 8}, set())
    assert plan_shrink(1, granules, uses, lambda: rollouts) == Shrink((2,), ("middle",))


def test_rollouts_that_share_a_prefix_go_together() -> None:
    granules = Granules(blocks=12, granule_blocks=4)
    rollouts = [Rollout("one", 10, {4, 5}), Rollout("two", 15, {4, 6}), Rollout("lone", 30, {8})]
    uses = uses_of(granules, {4, 5, 6, 8}, set())
    assert plan_shrink(1, granules, uses, lambda: rollouts) == Shrink((1,), ("one", "two"))


def test_rollouts_are_not_even_listed_while_granules_are_free() -> None:
    granules = Granules(blocks=8, granule_blocks=4)
    uses = uses_of(granules, set(), set())
    assert plan_shrink(1, granules, uses, lambda: pytest.fail("asked")).granules == (1,)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(-1, 40), st.integers(0, 40))
def test_a_cap_is_met_exactly_and_one_granule_always_stays(
    blocks: int, granule_blocks: int, cap: int, held: int
) -> None:
    granules = Granules(blocks, granule_blocks)
    held = min(held, granules.count - 1)
    mapped = granules.count - (held + granules_over(cap, granules, held))
    assert mapped == (granules.count if cap <= NO_CAP else min(cap, granules.count))
    assert mapped >= 1


@given(st.sets(st.integers(1, 50)), st.integers(0, 60))
def test_growth_gives_back_the_lowest(held: set[int], count: int) -> None:
    back = plan_growth(count, held)
    assert len(back) == min(count, len(held))
    assert all(granule < other for granule in back for other in held - set(back))


@pytest.mark.parametrize("mode", [mode for mode in GrantMode if mode is not GrantMode.KILL])
def test_a_live_grant_sets_the_cap_in_every_mode(mode: GrantMode) -> None:
    for cap in (0, 3, 12):
        grant = replace(LIVE, mode=mode, kv_granule_cap=cap)
        assert cap_in_force(grant, NOW_NS, LIMITS, before=5) == cap


@pytest.mark.parametrize(
    ("cap", "before", "now"), [(0, 5, 5), (9, 5, 5), (3, 5, 3), (3, 0, 3), (0, 0, 0)]
)
def test_an_expired_grant_only_tightens(cap: int, before: int, now: int) -> None:
    grant = replace(EXPIRED, kv_granule_cap=cap)
    assert cap_in_force(grant, NOW_NS, LIMITS, before) == now


def test_silence_changes_nothing() -> None:
    assert cap_in_force(None, NOW_NS, LIMITS, before=7) == 7


@given(st.integers(1, 300), st.integers(1, 20))
def test_granules_cover_every_block_once(blocks: int, granule_blocks: int) -> None:
    granules = Granules(blocks, granule_blocks)
    covered = [block for granule in range(granules.count) for block in granules.blocks_of(granule)]
    assert covered == list(range(blocks))
    assert all(
        granules.of(block) == granule
        for granule in range(granules.count)
        for block in granules.blocks_of(granule)
    )

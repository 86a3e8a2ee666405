"""Memory that a host lends, and a guest's share of it, under any use of the host's KV memory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import GuestState, HostState
from executor.kv.lending import (
    KvFree,
    LendingCore,
    LendingLimits,
    guest_granules,
    lent_bytes,
    owed_bytes,
)
from executor.kv.shrink_plan import Granules

SECOND = 10**9
COUNT, BLOCKS = 50, 4
LIMITS = LendingLimits(reserve=0.2, calm_ns=SECOND)


class Pool:
    """A pool whose blocks never share a granule with another kind."""

    def __init__(self, core: LendingCore, used: int, cached: int = 0) -> None:
        self.core = core
        self.used, self.cached, self.lent = used, cached, 0

    @property
    def free(self) -> KvFree:
        plain = COUNT * BLOCKS - self.used - self.cached - self.lent * BLOCKS
        return KvFree(plain, self.cached, self.lent)

    def step(self, now_ns: int, *, idle: bool = False, demand: int = 0) -> int:
        count = self.core.step(now_ns, self.free, demand, idle=idle)
        self.lent += count
        assert self.lent >= 0
        assert self.free.plain >= 0
        return count


def core() -> LendingCore:
    return LendingCore(Granules(COUNT * BLOCKS, BLOCKS), LIMITS)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2 * SECOND),
            st.integers(0, COUNT * BLOCKS),
            st.integers(0, COUNT * BLOCKS),
            st.integers(0, 60),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_the_reserve_is_never_lent_and_is_full_again_after_every_need(
    turns: list[tuple[int, int, int, int, bool]],
) -> None:
    pool, now_ns = Pool(core(), 0), 0
    whole = pool.core.reserve * BLOCKS
    for passed_ns, used, cached, demand, idle in turns:
        now_ns += passed_ns
        # An allocation that the mapped blocks do not cover takes lent granules back by itself.
        pool.used, pool.cached = used, min(cached, COUNT * BLOCKS - used)
        pool.lent = min(pool.lent, (COUNT * BLOCKS - pool.used - pool.cached) // BLOCKS)
        need = 0 if idle else demand
        count = pool.step(now_ns, idle=idle, demand=need)
        spare = pool.free.plain - need
        if count > 0:
            assert spare >= whole, "only what lies above the reserve is lent"
        if count < 0:
            assert pool.lent == 0 or spare >= whole, "the reserve is whole again"
        assert pool.lent == 0 or 2 * spare >= whole


def test_an_idle_host_lends_all_above_its_reserve_and_then_rests() -> None:
    pool = Pool(core(), used=0)
    assert pool.step(0, idle=True) == COUNT - 10
    assert [pool.step(now, idle=True) for now in range(1, 5)] == [0] * 4


def test_cached_prefixes_are_no_room_for_lending_but_they_are_no_need_either() -> None:
    pool = Pool(core(), used=0, cached=COUNT * BLOCKS)
    assert pool.step(0, idle=True) == 0
    assert pool.core.missing(pool.free) == 0
    full = Pool(core(), used=COUNT * BLOCKS - 4 * BLOCKS)
    assert full.core.missing(full.free) == 6


def test_a_small_request_is_served_from_the_reserve_and_moves_nothing() -> None:
    pool = Pool(core(), used=0)
    pool.step(0, idle=True)
    assert pool.step(1, demand=pool.core.reserve * BLOCKS // 2) == 0
    assert pool.step(2, demand=pool.core.reserve * BLOCKS // 2 + 1) < 0


def test_under_load_nothing_is_lent_until_the_host_was_calm_for_a_while() -> None:
    pool = Pool(core(), used=0)
    pool.step(0, idle=True)
    pool.used = 8 * BLOCKS
    assert pool.step(SECOND) < 0
    pool.used = 0
    assert pool.step(2 * SECOND - 1) == 0
    assert pool.step(2 * SECOND) > 0


@given(st.integers(0, COUNT * BLOCKS), st.integers(0, 60), st.booleans())
def test_under_a_constant_load_it_comes_to_rest(used: int, demand: int, idle: bool) -> None:
    pool = Pool(core(), used)
    need = 0 if idle else demand
    counts = [pool.step(turn * 2 * SECOND, idle=idle, demand=need) for turn in range(6)]
    assert counts[2:] == [0] * 4


@pytest.mark.parametrize("reserve", [0.0, -0.1, 1.1])
def test_a_reserve_that_makes_no_sense_is_refused(reserve: float) -> None:
    with pytest.raises(ValueError, match="give a share"):
        LendingLimits(reserve)


HOST = HostState(granules_total=50, granules_lent=10, bytes_lent=1000)
GUEST = GuestState(granules_total=40, granule_bytes=100)


@given(
    st.integers(0, 5_000),
    st.integers(0, 10_000),
    st.integers(0, 3),
    st.integers(0, 300),
    st.integers(0, 100),
)
def test_a_guest_never_gets_more_than_its_own_and_what_is_lent_now(
    base: int, lent: int, missing: int, granule: int, total: int
) -> None:
    host = replace(HOST, bytes_lent=lent, reserve_missing=missing)
    guest = replace(GUEST, granule_bytes=granule, granules_total=total)
    cap = guest_granules(base, host, guest)
    assert cap >= 1, "0 would lift the cap"
    assert cap == 1 or cap * granule <= base + lent_bytes(host)
    assert cap <= max(1, total)
    taken = missing * lent // HOST.granules_lent
    assert lent_bytes(host) == max(0, lent - taken), "reserved headroom is never granted"


def test_what_the_host_takes_back_leaves_the_cap_at_once() -> None:
    assert guest_granules(500, HOST, GUEST) == 15
    assert guest_granules(500, replace(HOST, bytes_lent=350), GUEST) == 8
    assert guest_granules(500, replace(HOST, reserve_missing=1), GUEST) == 14
    assert guest_granules(500, None, GUEST) == 5
    assert guest_granules(500, HOST, None) == 1


@pytest.mark.parametrize(
    ("lent", "missing", "mapped", "owed"),
    [
        (1_000, 0, 15, 0),
        (1_000, 0, 16, 100),
        (0, 0, 15, 1_000),
        (1_000, 1, 15, 100),
        (1_000, 30, 15, 1_000),
    ],
)
def test_what_a_guest_owes_is_what_it_keeps_of_what_was_taken_back(
    lent: int, missing: int, mapped: int, owed: int
) -> None:
    host = replace(HOST, bytes_lent=lent, reserve_missing=missing)
    assert owed_bytes(500, host, replace(GUEST, granules_mapped=mapped)) == owed
    assert owed_bytes(500, host, None) == 0

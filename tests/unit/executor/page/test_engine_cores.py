"""Engine cores of a data-parallel host share a page: the strictest of them counts, and all must."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import ControlPage, FreezeReason, HostSeat, HostState, PageError
from executor.control_page.host_seat import MOST_CORES
from executor.control_page.page import SETTLE_NS, strictest
from executor.kv.lending import lent_bytes

NOW = 10 * SETTLE_NS
CORES = 3


class Cores:
    """A host of CORES idle engine cores that are believed at NOW."""

    def __init__(self, path: Path) -> None:
        self.page = ControlPage.create(path)
        self.seats = [self.take(core) for core in range(CORES)]

    def take(self, core: int, cores: int = CORES) -> HostSeat:
        seat = self.page.take_host(NOW - 2 * SETTLE_NS, core, cores)
        seat.write(HostState(heartbeat_ns=NOW - SETTLE_NS))
        seat.beat(NOW)
        return seat

    def doubt(self) -> FreezeReason | None:
        return self.page.host_view().doubt(NOW)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Cores]:
    with ExitStack() as stack:
        made = Cores(tmp_path / "page")
        stack.callback(made.page.close)
        yield made
        for seat in made.seats:
            seat.close()


def test_a_host_counts_while_each_of_its_cores_does(host: Cores) -> None:
    view = host.page.host_view()
    assert (view.doubt(NOW), len(view.cores), len(view.seats)) == (None, CORES, CORES)
    assert view.believed(NOW) == host.page.host_state == HostState(heartbeat_ns=NOW - SETTLE_NS)


def ends(host: Cores, core: int) -> None:
    host.seats[core].close()


def is_silent(host: Cores, core: int) -> None:
    host.seats[core].beat(NOW - 2 * SETTLE_NS)


def is_new(host: Cores, core: int) -> None:
    host.seats[core].close()
    host.seats[core] = host.page.take_host(NOW - SETTLE_NS // 2, core, CORES)
    host.seats[core].beat(NOW)


def is_torn(host: Cores, core: int) -> None:
    section = host.page.cores[core].state
    section._words[section._word] |= 1


def is_of_another_host(host: Cores, core: int) -> None:
    host.seats[core].close()
    host.seats[core] = host.take(core, CORES + 1)


def vetoes(host: Cores, core: int) -> None:
    host.seats[core]._veto.renew()


@pytest.mark.parametrize("core", range(CORES))
@pytest.mark.parametrize(
    ("happens", "doubt"),
    [
        (ends, FreezeReason.NO_HOST),
        (is_silent, FreezeReason.HOST_SILENT),
        (is_new, FreezeReason.HOST_STARTING),
        (is_torn, FreezeReason.HOST_UNREADABLE),
        (vetoes, FreezeReason.HOST_VETO),
    ],
)
def test_one_core_that_does_not_count_is_enough(
    host: Cores, happens: Any, doubt: FreezeReason, core: int
) -> None:
    happens(host, core)
    assert host.doubt() is doubt


@pytest.mark.parametrize("core", [1, 2])
def test_a_core_of_another_host_does_not_count(host: Cores, core: int) -> None:
    is_of_another_host(host, core)
    assert host.doubt() is FreezeReason.HOST_UNREADABLE
    assert host.page.host_state is None


@pytest.mark.parametrize("core", range(CORES))
@pytest.mark.parametrize("work", [{"running": 1}, {"waiting": 1}, {"in_step": True}])
def test_one_busy_core_makes_a_busy_host(host: Cores, core: int, work: dict[str, Any]) -> None:
    host.seats[core].write(HostState(heartbeat_ns=NOW, **work))
    state = host.page.host_view().believed(NOW)
    assert state is not None
    assert not state.idle
    assert state.heartbeat_ns == NOW, "idle ones write nothing, so they are not silent"
    host.seats[core].cease()
    state = host.page.host_view().state
    assert state is not None
    assert not state.idle, "one that publishes no more is busy for good"


@pytest.mark.parametrize("cores", [0, MOST_CORES + 1, 1 << 40])
def test_an_impossible_number_of_cores_does_not_count(host: Cores, cores: int) -> None:
    seat = host.page.seat.read()
    assert seat is not None
    host.page.seat.write(replace(seat, cores=cores))
    assert host.doubt() is FreezeReason.HOST_UNREADABLE


def test_a_host_is_not_mixed_with_what_is_left_of_a_larger_one(tmp_path: Path) -> None:
    host = Cores(tmp_path / "page")
    for seat in host.seats[:-1]:
        seat.close()
    with pytest.raises(PageError, match=r"has a host: process .*; give each server a page"):
        host.page.take_host(NOW)
    host.seats[-1].close()
    seat = host.page.take_host(NOW - 2 * SETTLE_NS)
    seat.write(HostState(heartbeat_ns=NOW))
    seat.beat(NOW)
    assert host.doubt() is None
    assert host.page.host_view().cores == ()
    seat.close()
    with pytest.raises(PageError, match="which has 16 seats"):
        host.page.take_host(NOW, 0, MOST_CORES + 1)
    host.page.close()


def test_a_seat_is_one_cores(host: Cores) -> None:
    for core in range(CORES):
        with pytest.raises(PageError, match="has a host"):
            host.page.take_host(NOW, core, CORES)


FULL = HostState(
    3, True, 2, 1, 40, 900, 700, 30, 100, 50, 6, 400, 10, 4, 4_000, 1,
)  # fmt: skip
IDLE = HostState(7, False, 0, 0, 0, 0, 0, 10, 100, 20, 9, 100, 10, 6, 6_000, 0)


@pytest.mark.parametrize(
    ("states", "merged"),
    [
        pytest.param([FULL], FULL, id="one"),
        pytest.param(
            [FULL, IDLE],
            HostState(10, True, 2, 1, 40, 900, 700, 60, 200, 70, 9, 400, 10, 4, 4_000, 1),
            id="busy beside idle",
        ),
        pytest.param(
            [replace(FULL, heartbeat_ns=500, earliest_prefill_deadline_ns=0), IDLE, FULL],
            HostState(13, True, 4, 2, 80, 900, 700, 90, 300, 120, 9, 400, 10, 4, 4_000, 1),
            id="no deadline is not an early one, and the oldest busy one counts",
        ),
        pytest.param(
            [IDLE, replace(IDLE, bytes_lent=0, granules_lent=0, heartbeat_ns=90)],
            HostState(14, False, 0, 0, 0, 0, 0, 20, 200, 40, 9, 90, 10, 0, 0, 0),
            id="one that lends nothing",
        ),
        pytest.param([HostState(), HostState()], HostState(), id="zeroed"),
    ],
)
def test_the_strictest_of_all_cores(states: list[HostState], merged: HostState) -> None:
    assert strictest(states) == merged


few = st.integers(0, 200)
STATES = st.builds(
    HostState, few, st.booleans(), few, few, few, few, few, few, st.integers(200, 300), few, few,
    few, st.just(200), few, st.just(0), few,
)  # fmt: skip


@given(st.lists(STATES, min_size=1, max_size=MOST_CORES), st.floats(0, 0.5))
def test_no_core_is_worse_off_than_by_its_own_state(
    states: list[HostState], headroom: float
) -> None:
    states = [replace(state, bytes_lent=1_000 * state.granules_lent) for state in states]
    merged = strictest(states)
    assert merged.idle == all(state.idle for state in states)
    assert lent_bytes(merged) <= min(lent_bytes(state) for state in states)
    for state in states:
        assert merged.kv_used / merged.kv_total >= state.kv_used / state.kv_total
        assert merged.last_step_ns >= state.last_step_ns
        assert merged.queued_prefill_tokens >= state.queued_prefill_tokens
        assert merged.reserve_missing >= state.reserve_missing
        for name in ("earliest_prefill_deadline_ns", "earliest_decode_deadline_ns"):
            assert not getattr(state, name) or 0 < getattr(merged, name) <= getattr(state, name)


def test_sixteen_cores_have_a_seat_each(tmp_path: Path) -> None:
    with ControlPage.create(tmp_path / "page") as page:
        now_ns = time.monotonic_ns()
        seats = [page.take_host(now_ns - 2 * SETTLE_NS, n, MOST_CORES) for n in range(MOST_CORES)]
        for seat in seats:
            seat.write(HostState(heartbeat_ns=now_ns))
            seat.beat(now_ns)
        assert page.host_view().doubt(now_ns) is None
        for seat in seats:
            seat.close()

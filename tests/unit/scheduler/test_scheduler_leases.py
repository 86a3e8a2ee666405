"""Leases follow offers, time and the operator's word.

The stories are in tests/traces/scheduler.
"""

import pytest
from core_cases import JOB, CoreBench, offer
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import HarvestMode, ReplicaKind
from rose.errors import RefusedError
from rose.scheduler.core.messages import (
    Attached,
    Detached,
    Event,
    HarvestSet,
    JobRegistered,
    Offered,
    ReplicaDrained,
    RevokeAsked,
    TakenBack,
    Tick,
)


@pytest.fixture
def bench() -> CoreBench:
    bench = CoreBench().with_job()
    bench.attach()
    return bench


def test_while_the_store_is_locked_nothing_new_is_leased_and_what_lives_is_renewed(
    bench: CoreBench,
) -> None:
    bench.offered(offer("g0"))
    bench.locked = True
    for _ in range(20):
        bench.now_s += 1.0
        bench.offered(offer("g0", epoch=1), offer("g1"))
        assert [c.lease.replica for c in bench.commands() if c.HasField("lease")] == ["g0"]
        assert bench.row("g0").leased
        assert not bench.row("g1").leased
    assert len(bench.waiting) == 1, "one write waits, however long that takes"
    bench.unlock()
    assert (bench.lease().replica, bench.lease().epoch) == ("g1", 1)
    assert bench.row("g1").leased


def test_an_epoch_that_was_reserved_by_a_scheduler_that_died_is_not_used_again() -> None:
    first = CoreBench().with_job()
    first.attach()
    first.locked = True
    first.offered(offer("g0"))
    [reserve] = first.waiting
    first.write(reserve.write)
    second = CoreBench(store=first.store)
    second.attach()
    second.offered(offer("g0"))
    assert second.lease().epoch == 2


def test_an_unhealthy_offer_is_not_leased(bench: CoreBench) -> None:
    assert bench.offered(offer(healthy=False)) == []
    assert not bench.row().leased


def test_a_paused_scheduler_renews_nothing_that_ran_out(bench: CoreBench) -> None:
    bench.offered(offer(ttl_s=9.0))
    bench.at(107.0)
    assert "lease_expired" in bench.records()
    assert bench.lease().epoch == 2


def test_a_node_that_was_silent_for_too_long_gets_a_new_epoch(bench: CoreBench) -> None:
    bench.offered(offer(ttl_s=3.0))
    bench.at(102.0)
    bench.now_s = 105.5
    bench.offered()
    assert "lease_expired" in bench.records()
    assert bench.lease().epoch == 2


def test_new_offers_void_the_earlier_ones(bench: CoreBench) -> None:
    bench.offered(offer("g0"), offer("g1"))
    bench.offered(offer("g1"))
    assert [row.id for row in bench.table.replicas] == ["g1"]


def test_a_revocation_ends_the_lease_and_pauses_the_next(bench: CoreBench) -> None:
    bench.offered()
    bench.step(TakenBack(1, "g0", 1, "pressure"))
    assert "revoked" in bench.records()
    assert not bench.row().leased
    bench.at(100.9)
    assert bench.kinds() == []
    bench.at(101.0)
    assert bench.lease().epoch == 2


def test_reports_of_an_older_epoch_change_nothing(bench: CoreBench) -> None:
    bench.offered(offer(epoch=6))
    assert bench.lease().epoch == 7
    for stale in (
        TakenBack(1, "g0", 6, "late"),
        ReplicaDrained(1, "g0", 6, 0),
        ReplicaDrained(1, "x", 7, 0),
    ):
        bench.step(stale)
        assert bench.records() == []
    assert bench.row().leased


def test_an_operator_ends_a_lease_at_once(bench: CoreBench) -> None:
    bench.offered()
    bench.step(RevokeAsked("g0", "maintenance"))
    assert bench.answer() == 1
    [command] = bench.commands()
    assert (command.release.epoch, command.release.reason) == (1, "maintenance")
    assert not bench.row().leased
    bench.step(ReplicaDrained(1, "g0", 1, 2))
    bench.at(101.0)
    assert bench.lease().epoch == 2


def test_revoking_what_is_not_leased_is_refused(bench: CoreBench) -> None:
    with pytest.raises(RefusedError, match="rose status"):
        bench.step(RevokeAsked("g0", "x"))


def test_a_lost_node_takes_its_leases_along(bench: CoreBench) -> None:
    bench.attach(stream=2, node="n1")
    bench.offered()
    bench.offered(offer("d0", kind=ReplicaKind.DEDICATED, node="n1"), stream=2)
    bench.step(Detached(1))
    assert bench.records() == ["node_lost", "lease_released"]
    assert [row.id for row in bench.table.replicas] == ["d0"]
    bench.attach(stream=3)
    bench.offered(stream=3)
    assert bench.lease(3).epoch == 2


def test_a_replica_of_two_nodes_stays_with_the_first(bench: CoreBench) -> None:
    bench.attach(stream=2, node="n1")
    bench.offered()
    assert bench.offered(offer(node="n1"), stream=2) == []
    assert "offer_refused" in bench.records()
    bench.offered(offer(node="n1"), stream=2)
    assert bench.records() == []
    assert bench.row().node == "n0"


@pytest.mark.parametrize("mode", [HarvestMode.OFF, HarvestMode.HOLD, HarvestMode.HOLD_AND_DRAIN])
def test_guests_are_leased_only_when_active_but_dedicated_always(mode: HarvestMode) -> None:
    bench = CoreBench(mode).with_job()
    bench.attach()
    bench.offered(offer("g0"), offer("d0", kind=ReplicaKind.DEDICATED))
    assert bench.lease().replica == "d0"
    bench.step(HarvestSet(HarvestMode.ACTIVE, None))
    assert bench.lease().replica == "g0"


@pytest.mark.parametrize("mode", [HarvestMode.OFF, HarvestMode.HOLD_AND_DRAIN])
def test_a_stop_releases_guests_at_once(bench: CoreBench, mode: HarvestMode) -> None:
    bench.offered(offer("g0"), offer("d0", kind=ReplicaKind.DEDICATED))
    bench.step(HarvestSet(mode, None))
    assert bench.answer() == 1
    assert bench.kinds() == ["harvest", "release"]
    assert (bench.row("g0").leased, bench.row("d0").leased) == (False, True)
    bench.step(ReplicaDrained(1, "g0", 1, 3))
    assert bench.records() == ["lease_released"]
    bench.at(130.0)
    assert "g0" not in [lease.replica for lease in bench.core.status(130.0).leases]


def test_modes_survive_a_restart_and_are_told_on_attach(bench: CoreBench) -> None:
    bench.step(HarvestSet(HarvestMode.HOLD, None))
    bench.step(HarvestSet(HarvestMode.OFF, "g1"))
    again = CoreBench(HarvestMode.ACTIVE, bench.store)
    told = [(command.harvest.mode, command.harvest.replica) for command in again.attach()]
    assert told == [(2, ""), (1, "g1")]
    again.step(HarvestSet(HarvestMode.ACTIVE, "g1"))
    assert not CoreBench(store=bench.store).core.status(0.0).overrides


def test_a_silent_table_is_told_each_second_and_a_change_at_once(bench: CoreBench) -> None:
    bench.offered()
    revision = bench.table.revision
    bench.at(100.5)
    assert bench.table.revision == revision
    bench.at(101.0)
    assert bench.table.revision == revision + 1
    bench.offered(offer(policy_version=0, healthy=False))
    assert bench.table.revision == revision + 2


_EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Tick()),
    st.builds(Attached, st.sampled_from(["n0", "n1"]), st.integers(1, 4)),
    st.builds(Detached, st.integers(1, 4)),
    st.builds(
        Offered,
        st.integers(1, 4),
        st.builds(
            lambda healthy, epoch: (offer(healthy=healthy, epoch=epoch),),
            st.booleans(),
            st.integers(0, 9),
        ),
    ),
    st.builds(TakenBack, st.integers(1, 4), st.just("g0"), st.integers(0, 9), st.just("x")),
    st.builds(ReplicaDrained, st.integers(1, 4), st.just("g0"), st.integers(0, 9), st.just(0)),
    st.builds(HarvestSet, st.sampled_from(HarvestMode), st.sampled_from([None, "g0"])),
    st.just(JobRegistered(JOB, 1)),
)


@given(st.lists(st.tuples(_EVENTS, st.floats(0, 3), st.booleans()), max_size=60))
def test_whatever_happens_epochs_grow_and_only_active_modes_lend(
    history: list[tuple[Event, float, bool]],
) -> None:
    bench, newest, streams = CoreBench(), 0, set[int]()
    for event, pause_s, restart in history:
        if restart:
            bench, streams = CoreBench(store=bench.store), set()
        if isinstance(event, Attached):
            if event.stream in streams:
                continue
            streams.add(event.stream)
        bench.now_s += pause_s
        before = {lease.id for lease in bench.core.status(bench.now_s).leases}
        bench.step(event)
        snapshot = bench.core.status(bench.now_s)
        for lease in snapshot.leases:
            if lease.id not in before:
                assert lease.epoch > newest
                newest = lease.epoch
                assert snapshot.harvest == 4
                assert not snapshot.overrides

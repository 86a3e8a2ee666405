"""Tables and decisions of a large fleet come at its pace, whatever happens how often."""

from itertools import pairwise

import pytest

from elastic_scheduler import HarvestMode, LeaseDecision, Offer, Situation
from elastic_scheduler.policies.baselines import SpotPolicy
from rose.scheduler.core.leasing import PACE_S, SMALL_FLEET, LeaseTimes
from rose.scheduler.core.messages import Detached, Offered, PublishTable, RevokeAsked
from rose.scheduler.core.scheduler_core import TABLE_INTERVAL_S, SchedulerCore
from rose.scheduler.persistence import load
from tests.unit.scheduler.core_cases import CoreBench, offer

MOMENT_S = 0.01
LARGE, SMALL = SMALL_FLEET + 16, 16


class CountingPolicy(SpotPolicy):
    """Leases all that is offered, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, situation: Situation) -> LeaseDecision:
        self.asked += 1
        return super().decide(situation)


def offers_of(count: int, number: int = 0) -> tuple[Offer, ...]:
    return tuple(offer(f"n{number}.g{each:03}", node=f"n{number}") for each in range(count))


def leased_fleet(count: int) -> tuple[CoreBench, CountingPolicy]:
    """One node's replicas, all leased; two seconds later, so that nothing is left to say."""
    bench, policy = CoreBench(), CountingPolicy()
    times = LeaseTimes(cooldown_s=60.0)
    bench.core = SchedulerCore(load(()), HarvestMode.ACTIVE, times, policy)
    bench.with_job().attach()
    for _ in range(20):
        bench.at(bench.now_s + 0.1)
        bench.step(Offered(1, offers_of(count)))
    assert len(leased(bench)) == count
    return bench, policy


def leased(bench: CoreBench) -> set[str]:
    return {row.id for row in bench.table.replicas if row.leased}


def revoke_each(bench: CoreBench, count: int) -> list[float]:
    """A revocation each moment; when tables were published."""
    times_s = []
    for each in offers_of(count):
        bench.now_s += MOMENT_S
        bench.step(RevokeAsked(each.replica, "a storm"))
        if any(isinstance(action, PublishTable) for action in bench.actions):
            times_s.append(bench.now_s)
    return times_s


def test_a_storm_of_changes_in_a_large_fleet_is_told_once_each_pace() -> None:
    bench, _ = leased_fleet(LARGE)
    began_s = bench.now_s
    times_s = revoke_each(bench, LARGE)
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert min(gaps_s) >= PACE_S - 1e-9
    # None is left out either: the last change follows within its pace.
    assert len(times_s) >= (bench.now_s - began_s) / (PACE_S + MOMENT_S) - 1
    bench.at(bench.now_s + PACE_S)
    assert not leased(bench)


@pytest.mark.parametrize("count", [SMALL_FLEET, SMALL])
def test_a_small_fleet_is_told_of_each_change_at_once(count: int) -> None:
    bench, _ = leased_fleet(count)
    assert len(revoke_each(bench, count)) == count


def test_a_table_of_a_large_fleet_lags_by_its_pace_at_most() -> None:
    bench, _ = leased_fleet(LARGE)
    over: dict[str, float] = {}
    for each in offers_of(LARGE):
        bench.now_s += MOMENT_S
        bench.step(RevokeAsked(each.replica, "a storm"))
        over[each.replica] = bench.now_s
        still = leased(bench) & over.keys()
        assert all(bench.now_s - over[name] < PACE_S + MOMENT_S for name in still)


def test_a_quiet_large_fleet_is_told_each_second_and_no_more() -> None:
    bench, _ = leased_fleet(LARGE)
    revision, began_s = bench.table.revision, bench.now_s
    while bench.now_s < began_s + 5 * TABLE_INTERVAL_S:
        bench.at(bench.now_s + 0.1)
        bench.step(Offered(1, offers_of(LARGE)))
    assert 4 <= bench.table.revision - revision <= 5


def test_a_large_fleet_is_decided_over_at_its_pace_too() -> None:
    bench, policy = leased_fleet(LARGE)
    asked, began_s = policy.asked, bench.now_s
    revoke_each(bench, LARGE)
    # Once a second its nodes are judged, and decided over then as well.
    most = (bench.now_s - began_s) / PACE_S + (bench.now_s - began_s) + 2
    assert 1 <= policy.asked - asked <= most


def test_a_fleet_that_becomes_small_is_told_at_once_again() -> None:
    bench, _ = leased_fleet(LARGE)
    bench.attach(2, "n1")
    bench.step(Offered(2, offers_of(SMALL, 1)))
    bench.at(bench.now_s + 1.0)
    bench.step(Offered(2, offers_of(SMALL, 1)))
    bench.step(Detached(1))
    assert all(name.startswith("n1.") for name in leased(bench))
    before = bench.table.revision
    bench.step(RevokeAsked("n1.g000", "by hand"))
    assert bench.table.revision == before + 1

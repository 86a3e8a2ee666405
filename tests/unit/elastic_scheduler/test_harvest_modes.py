"""The operator's stop, where policies stand in nobody's way."""

import pytest

from elastic_scheduler import HarvestMode, HarvestModes, LeaseTable, Offer, ReplicaKind
from elastic_scheduler.capacity import CapacityGate, NodeFacts, cli_policy


def open_gate(mode: HarvestMode = HarvestMode.ACTIVE) -> CapacityGate:
    gate = CapacityGate(HarvestModes(mode), [cli_policy()])
    gate.greet(NodeFacts("n"), 0.0)
    return gate


def offer(replica: str, kind: ReplicaKind = ReplicaKind.GUEST, healthy: bool = True) -> Offer:
    return Offer(replica, kind, "http://h:1", "n", 4096, 1e3, 1e4, 0, healthy, 2.0, 0, 8)


@pytest.mark.parametrize(
    ("mode", "grants", "renews", "releases"),
    [
        (HarvestMode.ACTIVE, 1, 1, 0),
        (HarvestMode.HOLD, 0, 1, 0),
        (HarvestMode.HOLD_AND_DRAIN, 0, 0, 1),
        (HarvestMode.OFF, 0, 0, 1),
    ],
)
def test_the_mode_decides_over_guests_and_never_over_dedicated_replicas(
    mode: HarvestMode, grants: int, renews: int, releases: int
) -> None:
    book = LeaseTable(2.0)
    book.reserve("held", 1)
    book.grant("job", "held", 0.0)
    offers = [offer("held"), offer("new"), offer("own", ReplicaKind.DEDICATED)]
    plan = open_gate(mode).plan(offers, book.leases())
    assert [o.replica for o in plan.lease] == ["new"] * grants + ["own"]
    assert len(plan.renew) == renews
    assert len(plan.release) == releases


def test_the_stricter_of_cluster_and_replica_wins() -> None:
    policy = HarvestModes(HarvestMode.OFF)
    policy.set_mode(HarvestMode.ACTIVE, "g")
    assert policy.mode_of("g") is HarvestMode.OFF
    policy.set_mode(HarvestMode.ACTIVE)
    policy.set_mode(HarvestMode.HOLD_AND_DRAIN, "g")
    assert policy.mode_of("g") is HarvestMode.HOLD_AND_DRAIN
    assert policy.mode_of("other") is HarvestMode.ACTIVE
    policy.set_mode(HarvestMode.ACTIVE, "g")
    assert policy.overrides == {}


def test_an_unhealthy_replica_gets_no_new_lease() -> None:
    assert open_gate().plan([offer("g", healthy=False)], []).lease == ()


def test_a_lease_without_a_live_offer_is_left_to_expire() -> None:
    book = LeaseTable(2.0)
    book.reserve("gone", 1)
    book.grant("job", "gone", 0.0)
    plan = open_gate().plan([], book.leases())
    assert plan.renew == plan.release == ()

"""A new leader takes over the leases that nodes hold of the one before, and no others."""

import pytest

from elastic_scheduler import HarvestMode
from rose.rpc import rose_pb2 as pb
from rose.scheduler import wire
from rose.scheduler.core.leasing import SETTLE_S
from rose.scheduler.core.messages import (
    HarvestSet,
    Held,
    JobRegistered,
    Offered,
    RevokeAsked,
    Tick,
)
from tests.unit.scheduler.core_cases import JOB, CoreBench, offer


def led_before(*replicas: str) -> CoreBench:
    """A leader that granted leases of these replicas; its store outlives it."""
    bench = CoreBench().with_job()
    bench.attach()
    bench.offered(*(offer(name) for name in replicas))
    return bench


def new_leader(before: CoreBench) -> CoreBench:
    bench = CoreBench(store=before.store)
    bench.now_s = before.now_s + 2.5
    bench.step(Tick())
    return bench


def held(replica: str = "g0", job: str = JOB, epoch: int = 1, left_s: float = 2.0) -> Held:
    return Held(replica, job, epoch, left_s)


def test_a_lease_that_its_node_holds_goes_on_under_its_epoch() -> None:
    bench = new_leader(led_before("g0"))
    bench.attach()
    bench.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    assert "lease_adopted" in bench.records()
    assert bench.row().leased
    assert bench.row().lease_epoch == 1
    assert bench.lease().epoch == 1, "renewed at once: it has no long life left"
    bench.at(bench.now_s + 2.9)
    assert bench.row().leased


def test_an_adopted_lease_that_is_not_renewed_lives_no_longer_than_its_node_said() -> None:
    bench = new_leader(led_before("g0"))
    bench.step(HarvestSet(HarvestMode.HOLD_AND_DRAIN, None))
    bench.attach()
    bench.step(Offered(1, (offer(epoch=1),), held=(held(left_s=1.0),)))
    assert bench.kinds() == ["release"]
    bench.at(bench.now_s + 1.0)
    assert "lease_expired" in bench.records()


@pytest.mark.parametrize(
    "said",
    [held(epoch=2), held(job="other"), held(left_s=0.0)],
    ids=["another epoch", "another job", "over"],
)
def test_what_was_not_granted_like_that_ends(said: Held) -> None:
    bench = new_leader(led_before("g0"))
    bench.attach()
    bench.step(Offered(1, (offer(epoch=said.epoch),), held=(said,)))
    [ended] = [c.release for c in bench.commands() if c.HasField("release")]
    assert (ended.replica, ended.epoch) == ("g0", said.epoch)
    assert bench.lease().epoch > said.epoch, "and a lease of its own follows"


def test_a_leader_takes_over_nothing_that_it_ended_itself() -> None:
    bench = led_before("g0")
    bench.step(RevokeAsked("g0", "operator"))
    bench.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    assert not bench.row().leased
    later = new_leader(led_before("g0"))
    later.attach()
    later.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    later.step(RevokeAsked("g0", "operator"))
    later.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    assert not later.row().leased


def test_the_table_says_that_it_settles_until_all_were_heard_of_or_their_leases_are_over() -> None:
    bench = new_leader(led_before("g0", "g1"))
    assert bench.table.settling
    bench.attach()
    bench.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    assert bench.table.settling
    bench.step(Offered(1, (offer(epoch=1), offer("g1", epoch=1))))
    assert not bench.table.settling
    silent = new_leader(led_before("g0"))
    silent.at(silent.now_s + SETTLE_S)
    assert not silent.table.settling
    assert not CoreBench().with_job().table.settling, "a new store has nothing to wait for"


def test_of_several_jobs_none_gets_more_before_it_is_known_what_each_holds() -> None:
    before = led_before("g0", "g1", "g2")
    before.step(JobRegistered("other", 1))
    bench = new_leader(before)
    bench.attach()
    bench.step(Offered(1, (offer("g2", epoch=1),)))
    assert "lease_granted" not in bench.records(), "g0 and g1 may be leased"
    both = (offer(epoch=1), offer("g1", epoch=1))
    bench.step(Offered(1, (offer("g2", epoch=1), *both), held=(held(), held("g1"))))
    assert bench.records().count("lease_adopted") == 2
    assert bench.row("g2").leased
    silent = new_leader(before)
    silent.attach()
    silent.step(Offered(1, (offer("g2", epoch=1),)))
    silent.at(silent.now_s + SETTLE_S)
    silent.offered(offer("g2", epoch=1))
    assert silent.row("g2").leased, "whoever held the others holds them no more"


def test_a_held_lease_that_means_nothing_is_left_out_with_a_reason() -> None:
    message = pb.Offer(replica="a", url="http://a", kind=1, ttl_s=3)
    message.held.CopyFrom(pb.HeldLease(job="j", epoch=1, left_s=float("nan")))
    report = pb.NodeReport(node="n", offers=pb.Offers(offers=[message]))
    event = wire.event_of(report, 1)
    assert isinstance(event, Offered)
    assert not event.held
    assert len(event.refused) == 1

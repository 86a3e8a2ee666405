"""A node's view of a lease: epochs only grow, silence ends it."""

from hypothesis import given
from hypothesis import strategies as st

from rose.node.lease import HeldLease


def test_a_lease_ends_by_itself_when_nobody_renews_it() -> None:
    lease = HeldLease()
    assert lease.grant(epoch=1, ttl_s=5.0, now_s=100.0)
    assert lease.active(104.9)
    assert not lease.active(105.0)


def test_a_renewal_extends_a_live_lease_only() -> None:
    lease = HeldLease()
    lease.grant(epoch=1, ttl_s=5.0, now_s=0.0)
    assert lease.grant(epoch=1, ttl_s=5.0, now_s=4.0)
    assert lease.active(8.9)
    assert not lease.grant(epoch=1, ttl_s=5.0, now_s=20.0), "an expired lease is over"


def test_an_old_epoch_neither_grants_nor_releases() -> None:
    lease = HeldLease()
    lease.grant(epoch=3, ttl_s=5.0, now_s=0.0)
    assert not lease.grant(epoch=2, ttl_s=50.0, now_s=1.0)
    assert not lease.end(epoch=2)
    assert lease.active(1.0)


def test_a_process_that_slept_wakes_up_without_its_lease() -> None:
    lease = HeldLease()
    lease.grant(epoch=1, ttl_s=5.0, now_s=0.0)
    assert not lease.active(3_600.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_the_epoch_never_falls(events: list[tuple[bool, int]]) -> None:
    lease = HeldLease()
    seen = 0
    for now_s, (grants, epoch) in enumerate(events):
        if grants:
            lease.grant(epoch, 2.0, float(now_s))
        else:
            lease.end(epoch)
        assert lease.epoch >= seen
        seen = lease.epoch

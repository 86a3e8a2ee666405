import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import Lease, LeaseHeld, LeaseState, LeaseTable, StaleEpoch
from elastic_scheduler.leases.lease_table import MAX_EPOCH, MAX_EPOCH_LEAD

OPERATIONS = ("grant", "renew", "release", "released", "revoke", "expire", "restart")


def grant(book: LeaseTable, job: str, replica: str, now_s: float, *, seen_epoch: int = 0) -> Lease:
    """Grant like a scheduler: persist the next epoch, then use it."""
    book.reserve(replica, book.proposed(replica, seen_epoch))
    return book.grant(job, replica, now_s, seen_epoch=seen_epoch)


def test_a_lease_runs_out_and_counts_as_revoked() -> None:
    book = LeaseTable(ttl_s=2.0)
    lease = grant(book, "job", "g", now_s=0.0)
    assert book.live("g", 1.9) == lease
    assert book.live("g", 2.0) is None
    with pytest.raises(StaleEpoch):
        book.renew("g", lease.epoch, 2.0)
    assert book.expire(2.0) == (lease,)


def test_a_replica_that_is_being_released_is_not_leased_again_or_renewed() -> None:
    book = LeaseTable(ttl_s=2.0)
    lease = grant(book, "job", "g", now_s=0.0)
    assert book.begin_release("g", lease.epoch, 1.0).state is LeaseState.RELEASING
    with pytest.raises(StaleEpoch):
        book.renew("g", lease.epoch, 1.0)
    with pytest.raises(LeaseHeld):
        grant(book, "job", "g", 1.0)
    book.released("g", lease.epoch)
    assert grant(book, "job", "g", 1.0).epoch > lease.epoch


def test_a_late_message_of_an_old_epoch_cannot_end_a_younger_lease() -> None:
    book = LeaseTable(ttl_s=2.0)
    old = grant(book, "job", "g", 0.0)
    book.revoke("g", old.epoch)
    young = grant(book, "job", "g", 0.1)
    with pytest.raises(StaleEpoch, match="refused"):
        book.revoke("g", old.epoch)
    with pytest.raises(StaleEpoch):
        book.released("g", old.epoch)
    assert book.live("g", 0.2) == young


def test_epochs_grow_across_restarts_and_beyond_what_the_node_has_seen() -> None:
    book = LeaseTable(ttl_s=2.0, epochs={"g": 7})
    assert grant(book, "job", "g", 0.0, seen_epoch=11).epoch == 12
    assert grant(LeaseTable(2.0, book.epochs()), "job", "g", 0.0).epoch == 13


def test_no_lease_is_granted_under_an_epoch_that_is_not_reserved() -> None:
    book = LeaseTable(ttl_s=2.0)
    with pytest.raises(StaleEpoch, match="reserve"):
        book.grant("job", "g", 0.0)
    book.reserve("g", book.proposed("g"))
    with pytest.raises(StaleEpoch, match="reserve"):
        book.grant("job", "g", 0.0, seen_epoch=1)
    assert book.grant("job", "g", 0.0).epoch == 1
    book.revoke("g", 1)
    with pytest.raises(StaleEpoch, match="reserve"):
        book.grant("job", "g", 0.0)


@pytest.mark.parametrize(
    ("known", "seen"),
    [(0, MAX_EPOCH_LEAD + 1), (5, 2**53), (5, 2**64 - 1), (5, -1), (MAX_EPOCH - 1, MAX_EPOCH)],
)
def test_an_epoch_that_no_node_can_have_seen_is_not_believed(known: int, seen: int) -> None:
    book = LeaseTable(2.0, {"g": known})
    assert not book.believes("g", seen)
    with pytest.raises(StaleEpoch, match="too far ahead"):
        book.proposed("g", seen)
    assert book.believes("g", min(known, MAX_EPOCH - 1))


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 6), st.floats(0, 3))))
def test_leases_never_overlap_and_epochs_only_grow(
    script: list[tuple[str, int, float]],
) -> None:
    book, now_s, newest, holder_until_s = LeaseTable(ttl_s=2.0), 0.0, 0, 0.0
    for operation, epoch, wait_s in script:
        now_s += wait_s
        try:
            if operation == "grant":
                lease = grant(book, "job", "g", now_s)
                assert lease.epoch > newest
                assert now_s >= holder_until_s
                newest, holder_until_s = lease.epoch, lease.expires_s
            elif operation == "renew":
                holder_until_s = book.renew("g", epoch, now_s).expires_s
                assert epoch == newest
            elif operation == "release":
                assert book.begin_release("g", epoch, now_s).epoch == newest
            elif operation == "expire":
                assert all(lease.expires_s <= now_s for lease in book.expire(now_s))
            elif operation == "restart":
                # A new process knows no leases; it must wait a TTL, or rely on the epoch.
                book, holder_until_s = LeaseTable(2.0, book.epochs()), 0.0
            else:
                end = book.released if operation == "released" else book.revoke
                assert end("g", epoch).epoch == newest
                holder_until_s = 0.0
        except (LeaseHeld, StaleEpoch):
            continue


@pytest.mark.parametrize(("epoch", "taken"), [(4, False), (5, True), (6, False)])
def test_only_a_lease_of_the_newest_epoch_is_taken_over(epoch: int, taken: bool) -> None:
    book = LeaseTable(2.0, {"g0": 5})
    if taken:
        assert book.adopt("job", "g0", epoch, 1.0, 0.0).epoch == epoch
        return
    with pytest.raises(StaleEpoch):
        book.adopt("job", "g0", epoch, 1.0, 0.0)

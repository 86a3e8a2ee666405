"""Offers, leases, modes and health of replicas."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import (
    HarvestMode,
    HarvestModes,
    Health,
    HealthReport,
    Lease,
    LeaseHeld,
    LeaseState,
    LeaseTable,
    Offer,
    ReplicaHealth,
    ReplicaKind,
    StaleEpoch,
    StalenessBound,
)
from elastic_scheduler.capacity import CapacityGate, NodeFacts, cli_policy
from elastic_scheduler.leases.lease_table import MAX_EPOCH, MAX_EPOCH_LEAD, MAX_TOK_S
from elastic_scheduler.policies.rose import supply_of

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


# ---- bounds of offers ----


FIELDS: dict[str, object] = {
    "replica": "g0",
    "kind": ReplicaKind.GUEST,
    "url": "http://h",
    "node": "n0",
    "kv_tokens": 4096,
    "decode_tok_s": 100.0,
    "prefill_tok_s": 1000.0,
    "policy_version": 0,
    "healthy": True,
    "ttl_s": 3.0,
    "epoch": 0,
    "max_sequences": 8,
}
FIGURES = [
    "kv_tokens",
    "decode_tok_s",
    "prefill_tok_s",
    "policy_version",
    "ttl_s",
    "epoch",
    "max_sequences",
]


def offer_with(**changes: object) -> Offer:
    return Offer(**{**FIELDS, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 2.0**64])
def test_what_is_no_figure_is_refused_in_a_line_that_names_it(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        offer_with(**{name: value})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"replica": ""},
        {"replica": "x" * 254},
        {"replica": "g0\n"},
        {"node": ""},
        {"node": "\x00"},
        {"url": ""},
        {"url": "http://" + "x" * 2_048},
        {"epoch": MAX_EPOCH + 1},
    ],
)
def test_names_are_printable_and_everything_has_an_end(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"give|offer"):
        offer_with(**changes)


@given(st.lists(st.tuples(st.floats(), st.integers()), max_size=8), st.floats(0, 1e15))
def test_rates_of_accepted_offers_add_up_to_a_rate(
    said: list[tuple[float, int]], turns: float
) -> None:
    taken = []
    for rate, places in said:
        try:
            taken.append(offer_with(decode_tok_s=rate, max_sequences=places))
        except ValueError:
            continue
    assert 0 <= supply_of(taken).rate_tok_s(turns) <= len(taken) * MAX_TOK_S


# ---- modes ----


def open_gate(mode: HarvestMode = HarvestMode.ACTIVE) -> CapacityGate:
    gate = CapacityGate(HarvestModes(mode), [cli_policy()])
    gate.greet(NodeFacts("n"), 0.0)
    return gate


def guest_offer(replica: str, kind: ReplicaKind = ReplicaKind.GUEST, healthy: bool = True) -> Offer:
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
    offers = [guest_offer("held"), guest_offer("new"), guest_offer("own", ReplicaKind.DEDICATED)]
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
    assert open_gate().plan([guest_offer("g", healthy=False)], []).lease == ()


def test_a_lease_without_a_live_offer_is_left_to_expire() -> None:
    book = LeaseTable(2.0)
    book.reserve("gone", 1)
    book.grant("job", "gone", 0.0)
    plan = open_gate().plan([], book.leases())
    assert plan.renew == plan.release == ()


# ---- health ----


EVENTS = st.tuples(
    st.sampled_from(["heard", "publish", "silence", "restart"]),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 5),
)


def healthy(bound: int = 0, epoch: int = 1) -> ReplicaHealth:
    replica = ReplicaHealth(StalenessBound(bound))
    assert not replica.takes_turns
    assert replica.heard(HealthReport(True, 0, 0, epoch)) is Health.HEALTHY
    return replica


def test_a_replica_that_missed_a_version_gets_no_turns_until_it_caught_up() -> None:
    replica = healthy(bound=1)
    assert replica.heard(HealthReport(True, 0, 1, 1)) is Health.HEALTHY
    assert replica.heard(HealthReport(True, 0, 2, 1)) is Health.SYNCING
    assert replica.heard(HealthReport(True, 1, 2, 1)) is Health.HEALTHY


def test_weights_ahead_of_every_announced_version_are_not_the_jobs() -> None:
    assert healthy().heard(HealthReport(True, 3, 2, 1)) is Health.SYNCING


def test_a_dead_engine_gets_no_turns_and_comes_back_when_its_node_says_so() -> None:
    replica = healthy()
    assert replica.heard(HealthReport(False, 0, 0, 1)) is Health.DEAD
    assert replica.heard(HealthReport(True, 0, 0, 1)) is Health.HEALTHY


def test_an_engine_that_was_never_alive_is_starting_and_not_dead() -> None:
    replica = ReplicaHealth(StalenessBound(0))
    assert replica.heard(HealthReport(False, 0, 0, 1)) is Health.STARTING


def test_a_lease_from_before_a_stop_is_void_when_the_process_wakes_up() -> None:
    replica = healthy(epoch=4)
    replica.silenced()
    # SIGCONT: it goes on as if nothing had been.
    assert replica.heard(HealthReport(True, 0, 0, 4)) is Health.DEAD
    assert not replica.restarted(4)
    assert replica.restarted(5)
    assert replica.heard(HealthReport(True, 0, 0, 4)) is Health.STARTING
    assert replica.heard(HealthReport(True, 0, 0, 5)) is Health.HEALTHY


def test_what_was_leased_before_a_silence_is_void_even_if_it_was_never_confirmed() -> None:
    replica = healthy(epoch=4)
    replica.leased(5)
    replica.silenced()
    assert replica.heard(HealthReport(True, 0, 0, 5)) is Health.DEAD
    assert replica.restarted(6)


class LastReports:
    """The last reports about a replica, beside the machine under test."""

    def __init__(self, allowed: int) -> None:
        self.replica = ReplicaHealth(StalenessBound(allowed))
        self.latest = self.epoch = 0
        self.last: HealthReport | None = None

    def heard(self, alive: bool, behind: int, epoch: int) -> None:
        report = HealthReport(alive, max(0, self.latest - behind), self.latest, epoch)
        self.replica.heard(report)
        if epoch >= self.epoch:
            self.epoch, self.last = epoch, report

    def publish(self, alive: bool, behind: int, epoch: int) -> None:
        self.latest += 1
        if self.last is not None:
            known = HealthReport(self.last.alive, self.last.policy_version, self.latest, self.epoch)
            self.replica.heard(known)

    def restart(self, alive: bool, behind: int, epoch: int) -> None:
        if self.replica.restarted(epoch):
            self.epoch, self.last = epoch, None
            assert not self.replica.takes_turns

    def silence(self, alive: bool, behind: int, epoch: int) -> None:
        self.replica.silenced()
        assert not self.replica.takes_turns


@given(st.integers(0, 2), st.lists(EVENTS, max_size=60))
def test_turns_go_only_to_who_was_last_heard_alive_and_within_the_bound(
    allowed: int, script: list[tuple[str, bool, int, int]]
) -> None:
    told = LastReports(allowed)
    for what, alive, behind, epoch in script:
        getattr(told, what)(alive, behind, epoch)
        if told.replica.takes_turns:
            assert told.last is not None
            assert told.last.alive
            assert told.latest - told.last.policy_version <= allowed

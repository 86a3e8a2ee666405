"""Who may get turns: alive, caught up, heard of, proven, and under a lease that still counts."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import Health, HealthLimits, HealthReport, ReplicaHealth, StalenessBound

EVENTS = st.tuples(
    st.sampled_from(["heard", "publish", "failed", "served", "quarantine", "restart"]),
    st.booleans(),
    st.integers(0, 4),
    st.integers(0, 5),
    st.floats(0, 3),
)


def healthy(bound: int = 0, epoch: int = 1) -> ReplicaHealth:
    replica = ReplicaHealth(StalenessBound(bound), 0.0)
    assert not replica.takes_turns
    assert replica.heard(HealthReport(True, 0, 0, epoch), 0.0) is Health.HEALTHY
    return replica


def test_a_replica_that_missed_a_version_gets_no_turns_until_it_caught_up() -> None:
    replica = healthy(bound=1)
    assert replica.heard(HealthReport(True, 0, 1, 1), 0.1) is Health.HEALTHY
    assert replica.heard(HealthReport(True, 0, 2, 1), 0.2) is Health.SYNCING
    assert replica.served(0.3) is Health.SYNCING
    assert replica.heard(HealthReport(True, 1, 2, 1), 0.4) is Health.HEALTHY


def test_weights_ahead_of_every_announced_version_are_not_the_jobs() -> None:
    assert healthy().heard(HealthReport(True, 3, 2, 1), 0.1) is Health.SYNCING


def test_a_dead_engine_gets_no_turns_and_comes_back_when_its_node_says_so() -> None:
    replica = healthy()
    assert replica.heard(HealthReport(False, 0, 0, 1), 0.1) is Health.DEAD
    assert replica.served(0.2) is Health.DEAD
    assert replica.heard(HealthReport(True, 0, 0, 1), 0.3) is Health.HEALTHY


def test_a_lease_from_before_a_stop_is_void_when_the_process_wakes_up() -> None:
    replica = healthy(epoch=4)
    assert replica.tick(2.0) is Health.SUSPECT
    assert replica.tick(5.0) is Health.DEAD
    # SIGCONT: it goes on as if nothing had been.
    assert replica.heard(HealthReport(True, 0, 0, 4), 6.0) is Health.DEAD
    assert not replica.restarted(4, 6.1)
    assert replica.restarted(5, 6.2)
    assert replica.heard(HealthReport(True, 0, 0, 4), 6.3) is Health.STARTING
    assert replica.heard(HealthReport(True, 0, 0, 5), 6.4) is Health.HEALTHY


def test_what_was_leased_before_a_silence_is_void_even_if_it_was_never_confirmed() -> None:
    replica = healthy(epoch=4)
    replica.leased(5)
    replica.tick(5.0)
    assert replica.heard(HealthReport(True, 0, 0, 5), 6.0) is Health.DEAD
    assert replica.restarted(6, 6.1)


def test_silence_and_failures_are_forgiven_until_they_are_too_many() -> None:
    replica = healthy()
    assert replica.tick(2.5) is Health.SUSPECT
    assert replica.heard(HealthReport(True, 0, 0, 1), 2.6) is Health.HEALTHY
    assert replica.failed(3.0) is Health.SUSPECT
    assert replica.heard(HealthReport(True, 0, 0, 1), 3.1) is Health.SUSPECT
    assert replica.served(3.2) is Health.HEALTHY
    replica.failed(4.0)
    assert replica.heard(HealthReport(True, 0, 0, 1), 6.1) is Health.HEALTHY
    replica.failed(6.2)
    assert replica.failed(6.3) is Health.DEAD
    assert replica.heard(HealthReport(True, 0, 0, 1), 6.4) is Health.DEAD


def test_an_unproven_version_needs_a_new_engine() -> None:
    replica = healthy(epoch=2)
    replica.quarantine()
    assert replica.heard(HealthReport(True, 0, 0, 2), 0.1) is Health.QUARANTINED
    assert replica.tick(99.0) is Health.QUARANTINED
    assert replica.restarted(3, 99.0)
    assert replica.heard(HealthReport(True, 0, 0, 3), 99.1) is Health.HEALTHY


class Told:
    """What was last said about a replica, beside the machine under test."""

    def __init__(self, allowed: int) -> None:
        self.replica = ReplicaHealth(StalenessBound(allowed), 0.0, HealthLimits(2.0, 5.0, 3))
        self.latest = self.epoch = 0
        self.last: HealthReport | None = None

    def heard(self, alive: bool, behind: int, epoch: int, now_s: float) -> None:
        before = self.replica.state
        report = HealthReport(alive, max(0, self.latest - behind), self.latest, epoch)
        self.replica.heard(report, now_s)
        if before is Health.QUARANTINED:
            assert self.replica.state is before
        if epoch >= self.epoch:
            self.epoch, self.last = epoch, report

    def publish(self, alive: bool, behind: int, epoch: int, now_s: float) -> None:
        self.latest += 1
        if self.last is not None:
            known = HealthReport(self.last.alive, self.last.policy_version, self.latest, self.epoch)
            self.replica.heard(known, now_s)

    def restart(self, alive: bool, behind: int, epoch: int, now_s: float) -> None:
        if self.replica.restarted(epoch, now_s):
            self.epoch, self.last = epoch, None
            assert not self.replica.takes_turns

    def quarantine(self, alive: bool, behind: int, epoch: int, now_s: float) -> None:
        self.replica.quarantine()

    def failed(self, alive: bool, behind: int, epoch: int, now_s: float) -> None:
        self.replica.failed(now_s)
        assert not self.replica.takes_turns

    def served(self, alive: bool, behind: int, epoch: int, now_s: float) -> None:
        self.replica.served(now_s)


@given(st.integers(0, 2), st.lists(EVENTS, max_size=60))
def test_turns_go_only_to_who_was_last_heard_alive_and_within_the_bound(
    allowed: int, script: list[tuple[str, bool, int, int, float]]
) -> None:
    told, now_s = Told(allowed), 0.0
    for what, alive, behind, epoch, wait_s in script:
        now_s += wait_s
        told.replica.tick(now_s)
        getattr(told, what)(alive, behind, epoch, now_s)
        if told.replica.takes_turns:
            assert told.last is not None
            assert told.last.alive
            assert told.latest - told.last.policy_version <= allowed

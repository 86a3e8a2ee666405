"""Replicas that may get turns: alive, caught up, heard of, and under a valid lease."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import Health, HealthReport, ReplicaHealth, StalenessBound

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


class Told:
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
    told = Told(allowed)
    for what, alive, behind, epoch in script:
        getattr(told, what)(alive, behind, epoch)
        if told.replica.takes_turns:
            assert told.last is not None
            assert told.last.alive
            assert told.latest - told.last.policy_version <= allowed

"""Lease and engine together: no lease outlives the engine, the scheduler hears of every end."""

from hypothesis import given
from hypothesis import strategies as st

from rose.node.leases.lease_fsm import (
    ADOPTED,
    ENGINE_DOWN,
    EXPIRED,
    Admit,
    Drain,
    Ended,
    LeaseStateMachine,
    Revoked,
)


def _leased(epoch: int = 1) -> LeaseStateMachine:
    core = LeaseStateMachine()
    core.engine_up()
    core.grant(epoch, ttl_s=5.0, now_s=0.0)
    assert core.next(0.0) == Admit(epoch)
    core.admitted(epoch, core.life)
    assert core.next(0.0) is None
    return core


def test_a_release_drains_before_it_is_reported() -> None:
    core = _leased()
    core.release(1, "harvest")
    assert core.next(1.0) == Drain(1, "harvest")
    core.drained(core.life)
    assert core.next(1.0, aborted=7) == Ended(1, "harvest", 7, asked=True)
    assert core.next(1.0) is None


def test_a_lease_that_nobody_renews_is_taken_back_and_drained() -> None:
    core = _leased()
    assert core.next(5.0) == Revoked(1, EXPIRED)
    assert core.next(5.0) == Drain(1, EXPIRED)


def test_a_new_engine_gets_a_new_lease_never_the_old_one() -> None:
    core = _leased()
    core.engine_down()
    assert core.next(1.0) == Revoked(1, ENGINE_DOWN)
    assert core.next(1.0) == Ended(1, ENGINE_DOWN, 0, asked=False)
    core.engine_up()
    core.grant(1, ttl_s=5.0, now_s=1.0)
    assert core.next(1.0) is None, "the old epoch is history"
    core.grant(2, ttl_s=5.0, now_s=1.0)
    assert core.next(1.0) == Admit(2)


def test_the_next_lease_waits_for_the_drain_of_the_last() -> None:
    core = _leased()
    core.release(1, "drill")
    core.grant(2, ttl_s=5.0, now_s=0.5)
    assert core.next(0.5) == Drain(1, "drill")
    core.drained(core.life)
    assert isinstance(core.next(0.5), Ended)
    assert core.next(0.5) == Admit(2)


def test_an_answer_of_a_dead_engine_says_nothing_about_the_next() -> None:
    core = LeaseStateMachine()
    core.engine_up()
    core.grant(1, ttl_s=5.0, now_s=0.0)
    life = core.life
    core.engine_down()
    core.engine_up()
    core.admitted(1, life)
    assert core.vacant


def test_an_older_release_does_not_end_a_younger_lease() -> None:
    core = _leased(epoch=4)
    core.release(3, "late")
    assert core.next(1.0) is None
    assert core.held.active(1.0)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("grant", "release", "up", "down", "back", "tick")), st.integers(1, 6)
    ),
    max_size=40,
)


def _happen(core: LeaseStateMachine, name: str, epoch: int, now_s: float) -> None:
    {
        "grant": lambda: core.grant(epoch, 3.0, now_s),
        "release": lambda: core.release(epoch, "asked"),
        "up": core.engine_up,
        "down": core.engine_down,
        "back": lambda: core.take_back("own"),
        "tick": lambda: None,
    }[name]()


def _settle(core: LeaseStateMachine, now_s: float) -> set[int]:
    """Carry out all steps; returns the epochs whose end the scheduler was told."""
    told = set()
    for _ in range(6):
        step = core.next(now_s)
        if isinstance(step, Admit):
            assert core.held.active(now_s)
            assert step.epoch == core.held.epoch
            core.admitted(step.epoch, core.life)
        elif isinstance(step, Drain):
            core.drained(core.life)
        elif isinstance(step, Ended) and step.asked:
            told.add(step.epoch)
    assert core.next(now_s) is None, "it comes to rest"
    return told


@given(EVENTS)
def test_whatever_happens_it_settles_and_only_a_live_lease_admits(
    events: list[tuple[str, int]],
) -> None:
    core = LeaseStateMachine()
    asked, told = set(), set()
    for second, (name, epoch) in enumerate(events):
        if name == "release" and epoch >= core.held.epoch:
            asked.add(epoch)
        _happen(core, name, epoch, float(second))
        told |= _settle(core, float(second))
        assert core.vacant or core.held.active(float(second))
    assert asked == told, "every release that counts is answered"


def test_an_adopted_engine_is_drained_of_the_lease_that_ended_with_its_daemon() -> None:
    core = LeaseStateMachine()
    core.engine_up(epoch=6, admitting=True)
    core.grant(6, ttl_s=5.0, now_s=0.0)
    assert not core.held.open, "that lease is over, whoever still speaks of it"
    core.grant(7, ttl_s=5.0, now_s=0.0)
    assert core.next(0.0) == Drain(6, ADOPTED)
    core.drained(core.life)
    assert isinstance(core.next(0.0), Ended)
    assert core.next(0.0) == Admit(7)


def test_an_adopted_engine_that_admits_nobody_waits_for_a_lease() -> None:
    core = LeaseStateMachine()
    core.engine_up(epoch=6, admitting=False)
    assert core.vacant
    assert core.next(0.0) is None
    assert core.held.epoch == 6, "the scheduler hears it and grants a greater one"

"""Lease and engine together: no lease outlives the engine, the scheduler hears of every end.

The stories are in tests/traces/lease.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from rose.node.lease import (
    EXPIRED,
    SUPERSEDED,
    Action,
    Admit,
    Drain,
    Ended,
    EngineAdmitted,
    EngineDown,
    EngineDrained,
    EngineUp,
    Event,
    Granted,
    HeldLease,
    LeaseStateMachine,
    LeaseTakenBack,
    LeaseTick,
    Released,
    Revoked,
    SwitchBegun,
)
from tests.harness.examples import times

HAPPENINGS = st.lists(
    st.one_of(
        st.builds(Granted, st.integers(1, 6), st.just(3.0)),
        st.builds(Released, st.integers(1, 6), st.just("asked")),
        st.builds(Revoked, st.just("own")),
        st.just(EngineUp()),
        st.just(EngineDown()),
        st.just(SwitchBegun(4.0)),
        st.just(LeaseTick()),
    ),
    max_size=40,
)


def _settle(core: LeaseStateMachine, actions: list[Action], now_s: float) -> set[int]:
    """Carry out all actions; returns the epochs whose end the scheduler was told."""
    told = set()
    for _ in range(6):
        told |= {each.epoch for each in actions if isinstance(each, Ended) and each.asked}
        status, answer = core.status(), LeaseTick()
        match actions:
            case [*_, Admit(epoch, life)]:
                assert status.active(now_s)
                assert epoch == status.epoch
                answer = EngineAdmitted(epoch, life)
            case [*_, Drain(_, _, life)]:
                answer = EngineDrained(life)
        actions = core.step(answer, now_s)
    assert actions == [], "it comes to rest"
    return told


@given(HAPPENINGS)
def test_whatever_happens_it_settles_and_only_a_live_lease_admits(events: list[Event]) -> None:
    core = LeaseStateMachine()
    asked, told = set(), set()
    for second, event in enumerate(events):
        if isinstance(event, Released) and event.epoch >= core.status().epoch:
            asked.add(event.epoch)
        told |= _settle(core, core.step(event, float(second)), float(second))
        status = core.status()
        assert status.vacant or status.active(float(second))
    assert asked == told, "every release that counts is answered"


@settings(max_examples=times(4))
@given(HAPPENINGS, st.data())
def test_an_end_is_told_only_of_an_engine_that_runs_nothing_of_the_lease(
    events: list[Event], data: st.DataObject
) -> None:
    core = LeaseStateMachine()
    call: Admit | Drain | None = None
    runs: int | None = None

    def carried_out(actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Ended):
                assert runs is None
                assert not isinstance(call, Admit)
        return actions

    for second, event in enumerate(events):
        now_s = float(second)
        if isinstance(event, EngineUp | EngineDown):
            call = runs = None
        carried_out(core.step(event, now_s))
        if call is not None and data.draw(st.booleans(), "the call in flight ends"):
            life, runs = call.life, call.epoch if isinstance(call, Admit) else None
            answer = EngineDrained(life) if runs is None else EngineAdmitted(runs, life)
            call = None
            carried_out(core.step(answer, now_s))
        if call is None:  # The shell makes one call at a time.
            match carried_out(core.step(LeaseTick(), now_s)):
                case [*_, Admit() | Drain() as call]:
                    pass


def admitted(epoch: int, *lives: Event) -> LeaseStateMachine:
    """Return a lease that an engine took at 0 s for 3 s, in the last of its lives."""
    core = LeaseStateMachine()
    for event in (EngineUp(), *lives, Granted(epoch, 3.0)):
        core.step(event, 0.0)
    core.step(EngineAdmitted(epoch, life=1 + len(lives) // 2), 0.0)
    return core


def test_a_newer_lease_begins_once_the_turns_of_the_one_before_are_ended() -> None:
    # The scheduler saw the older one end before this node looked at its clock; the newer one may
    # be another job's, whose weights must not meet these turns.
    core = admitted(1)
    assert core.step(Granted(2, 3.0), 3.1) == [Drain(1, SUPERSEDED, life=1)]
    assert core.step(EngineDrained(1, aborted=4), 3.1) == [
        Ended(1, SUPERSEDED, 4, asked=False),
        Admit(2, life=1),
    ]


def test_a_drain_of_an_earlier_life_says_nothing_of_the_engine_of_now() -> None:
    core = admitted(1, EngineDown(), EngineUp())
    assert core.step(EngineDrained(1, aborted=9), 0.3) == []


def test_a_lease_is_over_at_its_end() -> None:
    core = admitted(1)
    assert core.step(LeaseTick(), 2.999) == []
    assert not core.status().active(3.0)
    assert core.step(LeaseTick(), 3.0) == [LeaseTakenBack(1, EXPIRED), Drain(1, EXPIRED, life=1)]


# ---- the lease that is held ----


def test_only_a_live_lease_of_the_newest_epoch_is_renewed_or_released() -> None:
    lease = HeldLease()
    assert lease.grant(epoch=3, ttl_s=5.0, now_s=0.0)
    assert lease.grant(epoch=3, ttl_s=5.0, now_s=4.0)
    assert not lease.grant(epoch=2, ttl_s=50.0, now_s=4.0)
    assert not lease.end(epoch=2)
    assert lease.active(8.9)
    assert not lease.active(9.0)
    assert not lease.grant(epoch=3, ttl_s=5.0, now_s=20.0), "an expired lease is over"


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

"""The reclaim ladder believes what is measured, and ends in time whatever its engine says."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from executor.kv.reclaim_ladder import (
    Answer,
    EngineReport,
    Escalate,
    Finished,
    LadderLimits,
    OverdueTimer,
    ReclaimCore,
    ReclaimLevel,
    ReclaimOutcome,
    Unsupported,
)

MS = 1_000_000
MIB = 1 << 20
TICK_NS = 20 * MS
HELD = 1_000 * MIB


@dataclass
class Engine:
    """Answers each level after `after_ns` with what it claims; its memory falls as `frees` says."""

    claims: dict[ReclaimLevel, int]
    frees: dict[ReclaimLevel, int]
    unsupported: set[ReclaimLevel] = field(default_factory=set)
    after_ns: int = 40 * MS
    falls_after_ns: int = 40 * MS
    held: int = HELD
    asked_at_ns: dict[ReclaimLevel, int] = field(default_factory=dict)

    def play(self, wanted: int, within_ns: int) -> tuple[Finished, list[ReclaimLevel]]:
        core = ReclaimCore(0, self.held, wanted, within_ns)
        asked: list[tuple[ReclaimLevel, int]] = []
        answer: Answer = None
        for now_ns in range(0, 60_000 * MS, TICK_NS):
            if asked:
                level, since_ns = asked[-1]
                if now_ns - since_ns >= self.falls_after_ns:
                    self.held -= self.frees.pop(level, 0)
                answer = None
                if level in self.unsupported:
                    answer = Unsupported("no such thing here")
                elif level in self.claims and now_ns - since_ns >= self.after_ns:
                    answer = EngineReport(self.claims[level])
            action = core.step(now_ns, self.held, answer)
            if isinstance(action, Finished):
                return action, [level for level, _ in asked]
            if isinstance(action, Escalate):
                assert action.bytes_left > 0
                asked.append((action.level, now_ns))
                self.asked_at_ns[action.level] = now_ns
        raise AssertionError("no end")


def outcomes(finished: Finished) -> dict[ReclaimLevel, ReclaimOutcome]:
    return {report.level: report.outcome for report in finished.levels}


def test_a_balloon_that_gives_what_is_wanted_is_the_end_of_it() -> None:
    engine = Engine(
        {ReclaimLevel.FREEZE: 0, ReclaimLevel.BALLOON: 300 * MIB}, {ReclaimLevel.BALLOON: 300 * MIB}
    )
    finished, asked = engine.play(300 * MIB, 5_000 * MS)
    assert asked == [ReclaimLevel.FREEZE, ReclaimLevel.BALLOON]
    assert finished.enough
    assert finished.in_time
    assert finished.freed_bytes == 300 * MIB
    assert outcomes(finished)[ReclaimLevel.BALLOON] is ReclaimOutcome.FREED


def test_each_level_frees_what_it_can_until_it_is_enough() -> None:
    frees = {
        ReclaimLevel.BALLOON: 100 * MIB,
        ReclaimLevel.RELEASE_KV: 200 * MIB,
        ReclaimLevel.SLEEP: 500 * MIB,
    }
    finished, asked = Engine({ReclaimLevel.FREEZE: 0, **frees}, dict(frees)).play(
        700 * MIB, 9_000 * MS
    )
    assert asked == [
        ReclaimLevel.FREEZE,
        ReclaimLevel.BALLOON,
        ReclaimLevel.RELEASE_KV,
        ReclaimLevel.SLEEP,
    ]
    assert finished.enough
    assert outcomes(finished)[ReclaimLevel.BALLOON] is ReclaimOutcome.TOO_LITTLE


def test_sleep_reported_success_but_memory_stayed_held() -> None:
    engine = Engine(
        {
            ReclaimLevel.FREEZE: 0,
            ReclaimLevel.BALLOON: 0,
            ReclaimLevel.RELEASE_KV: 0,
            ReclaimLevel.SLEEP: 800 * MIB,
        },
        {ReclaimLevel.KILL: HELD},
    )
    finished, asked = engine.play(600 * MIB, 10_000 * MS)
    assert asked[-2:] == [ReclaimLevel.SLEEP, ReclaimLevel.KILL]
    assert outcomes(finished)[ReclaimLevel.SLEEP] is ReclaimOutcome.HELD
    (slept,) = [report for report in finished.levels if report.level is ReclaimLevel.SLEEP]
    assert (slept.claimed_bytes, slept.freed_bytes) == (800 * MIB, 0)
    assert slept.took_ns <= 40 * MS + 150 * MS + 2 * TICK_NS, "it is not waited for to the end"
    assert finished.enough
    assert finished.freed_bytes == HELD


def test_release_returned_early() -> None:
    """The answer comes at once, the pages go 120 ms later: done is when they are gone."""
    engine = Engine(
        {ReclaimLevel.FREEZE: 0, ReclaimLevel.BALLOON: 400 * MIB},
        {ReclaimLevel.BALLOON: 400 * MIB},
        after_ns=0,
        falls_after_ns=120 * MS,
    )
    finished, asked = engine.play(400 * MIB, 5_000 * MS)
    assert asked == [ReclaimLevel.FREEZE, ReclaimLevel.BALLOON], "it is waited for, not killed"
    assert finished.enough
    (balloon,) = [report for report in finished.levels if report.level is ReclaimLevel.BALLOON]
    assert balloon.took_ns >= 120 * MS, "and not believed before"


def test_a_level_the_engine_does_not_have_is_skipped_and_said() -> None:
    engine = Engine(
        {ReclaimLevel.FREEZE: 0, ReclaimLevel.BALLOON: 0, ReclaimLevel.RELEASE_KV: 0},
        {ReclaimLevel.KILL: HELD},
        unsupported={ReclaimLevel.SLEEP},
    )
    finished, _ = engine.play(HELD, 10_000 * MS)
    assert outcomes(finished)[ReclaimLevel.SLEEP] is ReclaimOutcome.UNSUPPORTED
    (skipped,) = [report for report in finished.levels if report.level is ReclaimLevel.SLEEP]
    assert skipped.why == "no such thing here"
    assert skipped.took_ns <= TICK_NS
    assert finished.levels[-1].level is ReclaimLevel.KILL


def test_what_cannot_be_measured_is_not_freed() -> None:
    core = ReclaimCore(0, HELD, MIB, 3_000 * MS)
    asked, finished = [], None
    for now_ns in range(0, 20_000 * MS, TICK_NS):
        action = core.step(now_ns, None, EngineReport(HELD))
        if isinstance(action, Escalate):
            asked.append(action.level)
        if isinstance(action, Finished):
            finished = action
            break
    assert asked[-1] is ReclaimLevel.KILL
    assert finished is not None
    assert not finished.enough


def test_nothing_wanted_is_nothing_done() -> None:
    finished, asked = Engine({}, {}).play(0, 0)
    assert (finished.enough, asked, finished.levels) == (True, [], ())


RUNGS = st.sampled_from(list(ReclaimLevel))
AMOUNTS = st.integers(0, 600).map(lambda mib: mib * MIB)


@given(
    st.dictionaries(RUNGS, AMOUNTS),
    st.dictionaries(RUNGS, AMOUNTS),
    st.sets(RUNGS),
    st.integers(0, 2_000).map(lambda ms: ms * MS),
    st.integers(0, 2_000).map(lambda ms: ms * MS),
    AMOUNTS,
    st.integers(0, 12_000).map(lambda ms: ms * MS),
)
def test_it_climbs_only_and_ends_in_time_with_what_was_measured(
    claims: dict[ReclaimLevel, int],
    frees: dict[ReclaimLevel, int],
    unsupported: set[ReclaimLevel],
    after_ns: int,
    falls_after_ns: int,
    wanted: int,
    within_ns: int,
) -> None:
    engine = Engine(
        claims, dict(frees), unsupported - {ReclaimLevel.KILL}, after_ns, falls_after_ns
    )
    finished, asked = engine.play(wanted, within_ns)
    assert asked == sorted(set(asked)), "never down, never twice"
    assert finished.freed_bytes == HELD - engine.held, "what was measured, whatever was claimed"
    assert finished.enough == (HELD - engine.held >= wanted)
    assert finished.enough or asked[-1] is ReclaimLevel.KILL
    kill_ns = LadderLimits().level_ns[ReclaimLevel.KILL]
    assert finished.took_ns <= max(within_ns, kill_ns) + 3 * TICK_NS
    assert finished.in_time == (finished.enough and finished.took_ns <= within_ns)
    others = [
        at_ns for level, at_ns in engine.asked_at_ns.items() if level is not ReclaimLevel.KILL
    ]
    assert all(at_ns <= max(0, within_ns - kill_ns) for at_ns in others)
    if ReclaimLevel.KILL in asked:
        assert engine.asked_at_ns[ReclaimLevel.KILL] <= max(0, within_ns - kill_ns) + 2 * TICK_NS


def test_memory_that_is_owed_for_too_long_begins_a_reclaim_once() -> None:
    debt = OverdueTimer(200 * MS, 500 * MS)
    ticks = [(0, 0), (100, 9), (550, 8), (600, 7), (700, 7), (1_050, 6), (1_100, 5), (1_150, 0)]
    assert [debt.step(at * MS, owed) for at, owed in ticks] == [0, 0, 0, 7, 0, 0, 5, 0]
    assert debt.step(1_700 * MS, 5) == 0, "a payment begins a new patience"


def test_who_owes_for_a_while_is_pressed_until_all_is_paid() -> None:
    debt = OverdueTimer(200 * MS, 500 * MS)
    pressed = []
    for at, owed in [(0, 9), (150, 9), (200, 8), (900, 1), (920, 0), (940, 4), (1_139, 4)]:
        debt.step(at * MS, owed)
        pressed.append(debt.pressed)
    assert pressed == [False, False, True, True, False, False, False]

"""The reclaim ladder believes what is measured, and ends in time whatever its engine says.

The stories are in tests/traces/reclaim.
"""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from executor.kv.reclaim_ladder import (
    Answer,
    EngineReport,
    Finished,
    GuestMeasured,
    LadderLimits,
    OverdueTimer,
    ReclaimCore,
    ReclaimLevel,
    Unsupported,
)

MS = 1_000_000
MIB = 1 << 20
TICK_NS = 20 * MS
HELD = 1_000 * MIB


@dataclass
class ReclaimedEngine:
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
            for action in core.step(GuestMeasured(self.held, answer), now_ns):
                if isinstance(action, Finished):
                    return action, [level for level, _ in asked]
                assert action.bytes_left > 0
                asked.append((action.level, now_ns))
                self.asked_at_ns[action.level] = now_ns
        raise AssertionError("no end")


LEVELS = st.sampled_from(list(ReclaimLevel))
AMOUNTS = st.integers(0, 600).map(lambda mib: mib * MIB)


@given(
    st.dictionaries(LEVELS, AMOUNTS),
    st.dictionaries(LEVELS, AMOUNTS),
    st.sets(LEVELS),
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
    engine = ReclaimedEngine(
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

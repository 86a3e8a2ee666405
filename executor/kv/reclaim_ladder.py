"""The reclaim ladder: how memory comes back from a guest, each level harder than the one before.

    L0 freeze ─> L1 balloon to a cap ─> L2 release all KV ─> L3 sleep the weights ─> L4 kill

Only measured bytes of the guest's process group end a level early. Its engine's claim only starts a
short wait for these bytes to be gone: an engine that claims to sleep and keeps its memory costs one
level, and one that answers before its pages are gone is waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final

_MS: Final = 1_000_000
# vLLM's level of its sleep that gives up weights and KV, for ReclaimLevel.SLEEP.
SLEEP_LEVEL: Final = 2


class ReclaimLevel(IntEnum):
    """Levels of a reclaim, in the order in which they are taken, each harder for the guest."""

    FREEZE = 0
    BALLOON = 1
    RELEASE_KV = 2
    SLEEP = 3
    KILL = 4


class ReclaimOutcome(StrEnum):
    """Result of a level. HELD: the engine claimed more freed bytes than were measured."""

    FREED = "freed"
    TOO_LITTLE = "too_little"
    HELD = "held"
    LATE = "late"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Engine's answer to a level: it is done, and claims to have freed these bytes."""

    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Engine's answer to a level that it does not have, with the reason."""

    why: str


Answer = EngineReport | Unsupported | None


@dataclass(frozen=True, slots=True)
class GuestMeasured:
    """Event for the reclaim: memory of the guest's process group, None if not measured.

    answer: the engine's, to the last requested level; None before it.
    """

    held_bytes: int | None
    answer: Answer = None


@dataclass(frozen=True, slots=True)
class Settled:
    """Event for the reclaim: its aim was reached in another way, whatever was measured."""


Event = GuestMeasured | Settled


@dataclass(frozen=True, slots=True)
class Escalate:
    """Action of the reclaim: take this level now; `bytes_left` are still wanted."""

    level: ReclaimLevel
    bytes_left: int


@dataclass(frozen=True, slots=True)
class LevelReport:
    """Result of one level: measured and claimed bytes, time taken, `why` if it was unsupported."""

    level: ReclaimLevel
    outcome: ReclaimOutcome
    freed_bytes: int
    claimed_bytes: int
    took_ns: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """Action of the reclaim: it is over. `freed_bytes` as measured, with a report of each level.

    `enough`: the wanted bytes are free. `in_time`: before the deadline.
    """

    wanted_bytes: int
    freed_bytes: int
    enough: bool
    in_time: bool
    took_ns: int
    levels: tuple[LevelReport, ...]


Action = Escalate | Finished


@dataclass(frozen=True, slots=True)
class ReclaimStatus:
    """State of the reclaim: its last level, the guest's memory, and the bytes still wanted."""

    level: ReclaimLevel | None
    held_bytes: int
    wanted_bytes: int


_LEVEL_NS: Final = MappingProxyType(
    {
        ReclaimLevel.FREEZE: 100 * _MS,
        ReclaimLevel.BALLOON: 1_000 * _MS,
        ReclaimLevel.RELEASE_KV: 1_000 * _MS,
        ReclaimLevel.SLEEP: 2_000 * _MS,
        ReclaimLevel.KILL: 1_000 * _MS,
    }
)


@dataclass(frozen=True, slots=True)
class LadderLimits:
    """Time limits of a reclaim in nanoseconds, and the noise of its measurements.

    level_ns: the most that each level may take; KILL's time is kept free before the deadline.
    settle_ns: a claim is false if nothing moved for this long after it and after the last freed
    byte. noise_bytes: changes of a process's size without a cause.
    """

    level_ns: Mapping[ReclaimLevel, int] = field(default_factory=lambda: _LEVEL_NS)
    settle_ns: int = 150 * _MS
    noise_bytes: int = 1 << 20


class ReclaimCore:
    """State machine of one reclaim; clock, measured sizes and answers are passed in."""

    def __init__(
        self,
        now_ns: int,
        held_bytes: int | None,
        wanted_bytes: int,
        deadline_ns: int,
        limits: LadderLimits | None = None,
    ) -> None:
        """Begin before the first level.

        held_bytes: memory of the guest's process group, None if unknown. wanted_bytes: to be freed,
        up to all of it. The first figure may also come during FREEZE, which frees nothing; without
        one by then only the last level counts as a help.
        """
        self._limits = limits or LadderLimits()
        self._began_ns = now_ns
        self._deadline_ns = deadline_ns
        self._wanted_bytes = max(0, wanted_bytes)
        self._measured_before = held_bytes is not None
        self._level: ReclaimLevel | None = None
        self._level_began_ns = now_ns
        self._begin_with(self._wanted_bytes if held_bytes is None else held_bytes)
        self._claim: EngineReport | None = None
        self._moved_ns = now_ns
        self._reports: list[LevelReport] = []

    def step(self, event: Event, now_ns: int) -> list[Action]:
        """Return the actions of this moment: none, one Escalate, or Finished as the last one."""
        if isinstance(event, Settled):
            return [self._end(now_ns, enough=True)]
        action = self._climb_or_end(event, now_ns)
        return [] if action is None else [action]

    def status(self) -> ReclaimStatus:
        left = max(0, self._held_bytes - self._goal_bytes)
        return ReclaimStatus(self._level, self._held_bytes, left)

    def _climb_or_end(self, event: GuestMeasured, now_ns: int) -> Action | None:
        answer = event.answer
        self._measured(now_ns, event.held_bytes)
        if self._held_bytes <= self._goal_bytes:
            return self._finish(now_ns, ReclaimOutcome.FREED)
        if self._level is None:
            return self._climb(now_ns, ReclaimLevel.FREEZE)
        if isinstance(answer, EngineReport) and self._claim is None:
            self._claim = answer
            self._moved_ns = max(self._moved_ns, now_ns)
        outcome = self._outcome(now_ns, answer)
        if outcome is None:
            return None
        if self._level is ReclaimLevel.KILL:
            return self._finish(now_ns, outcome)
        self._report(now_ns, outcome, answer.why if isinstance(answer, Unsupported) else "")
        too_late = now_ns >= self._last_call_ns
        return self._climb(now_ns, ReclaimLevel.KILL if too_late else ReclaimLevel(self._level + 1))

    @property
    def _last_call_ns(self) -> int:
        return self._deadline_ns - self._limits.level_ns[ReclaimLevel.KILL]

    def _begin_with(self, held_bytes: int) -> None:
        self._start_bytes = self._held_bytes = self._level_bytes = held_bytes
        self._goal_bytes = max(0, held_bytes - self._wanted_bytes)

    def _measured(self, now_ns: int, held_bytes: int | None) -> None:
        if held_bytes is None:
            return
        if not self._measured_before and self._level in (None, ReclaimLevel.FREEZE):
            self._begin_with(held_bytes)
        self._measured_before = True
        if held_bytes < self._held_bytes - self._limits.noise_bytes:
            self._moved_ns = now_ns
        self._held_bytes = held_bytes

    def _outcome(self, now_ns: int, answer: Answer) -> ReclaimOutcome | None:
        """Return the result of the level, None while it may still free the wanted bytes."""
        assert self._level is not None
        if self._level is not ReclaimLevel.KILL:
            if isinstance(answer, Unsupported):
                return ReclaimOutcome.UNSUPPORTED
            if now_ns >= self._last_call_ns:
                return ReclaimOutcome.LATE
            if self._claim and self._level is ReclaimLevel.FREEZE:
                return ReclaimOutcome.TOO_LITTLE  # It frees nothing, and takes nothing more.
            if self._claim and now_ns - self._moved_ns >= self._limits.settle_ns:
                return self._judge(self._claim)
        late = now_ns - self._level_began_ns >= self._limits.level_ns[self._level]
        return ReclaimOutcome.LATE if late else None

    def _judge(self, claim: EngineReport) -> ReclaimOutcome:
        missing = claim.freed_bytes - (self._level_bytes - self._held_bytes)
        return (
            ReclaimOutcome.HELD if missing > self._limits.noise_bytes else ReclaimOutcome.TOO_LITTLE
        )

    def _climb(self, now_ns: int, level: ReclaimLevel) -> Escalate:
        assert self._level is None or level > self._level
        self._level = level
        self._level_began_ns = self._moved_ns = now_ns
        self._level_bytes = self._held_bytes
        self._claim = None
        return Escalate(level, self._held_bytes - self._goal_bytes)

    def _report(self, now_ns: int, outcome: ReclaimOutcome, why: str = "") -> None:
        if self._level is not None:
            self._reports.append(
                LevelReport(
                    self._level,
                    outcome,
                    self._level_bytes - self._held_bytes,
                    self._claim.freed_bytes if self._claim else 0,
                    now_ns - self._level_began_ns,
                    why,
                )
            )

    def _finish(self, now_ns: int, outcome: ReclaimOutcome) -> Finished:
        self._report(now_ns, outcome)
        return self._end(now_ns, enough=self._held_bytes <= self._goal_bytes)

    def _end(self, now_ns: int, *, enough: bool) -> Finished:
        return Finished(
            self._wanted_bytes,
            self._start_bytes - self._held_bytes,
            enough,
            enough and now_ns <= self._deadline_ns,
            now_ns - self._began_ns,
            tuple(self._reports),
        )


class OverdueTimer:
    """Timer of a guest's debt of KV memory: when to press it, and when to begin a reclaim.

    `pressed` is True from `press_ns` after the debt's begin until the guest owes nothing: the guest
    should do nothing but return memory, with a core to do it on. A reclaim is due every
    `patience_ns`.
    """

    def __init__(self, press_ns: int, patience_ns: int) -> None:
        self._press_ns = press_ns
        self._patience_ns = patience_ns
        self._since_ns: int | None = None
        self._asked_ns = 0
        self.pressed = False

    def step(self, now_ns: int, owed_bytes: int) -> int:
        """Return the bytes for a reclaim to begin now; 0 if none is due."""
        if owed_bytes <= 0:
            self._since_ns, self.pressed = None, False
            return 0
        if self._since_ns is None:
            self._since_ns = self._asked_ns = now_ns
        self.pressed = now_ns - self._since_ns >= self._press_ns
        if now_ns - self._asked_ns < self._patience_ns:
            return 0
        self._asked_ns = now_ns
        return owed_bytes

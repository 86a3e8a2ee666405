"""Proof of a stop: a guest that must not exist holds and does nothing, as measured, in time.

    barred ──► held bytes and duty are 0 ──► proved, with its seconds
       └─────► the deadline passes first ──► overdue, with what is left; proved when it is gone
    allowed ─► begins anew

Whoever gave the order (scheduler, file, signal) reads the same two events.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """One look at a guest; held_bytes is None when nobody could measure.

    deadline_s: how long the stop may take. duty: share of the last second in which it ran. order_s:
    tells stops apart between which nobody looked.
    """

    barred: bool
    held_bytes: int | None
    duty: float
    deadline_s: float
    order_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Said:
    """An event for the node's log."""

    event: str
    fields: Mapping[str, object]


class StopProof:
    """State machine of one guest's stops; the clock is handed in."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._order_s = 0.0
        self._proved = False
        self._overdue = False

    def step(self, seen: Measured, now_s: float) -> list[Said]:
        """Return the records that a measurement calls for."""
        if not seen.barred or seen.order_s != self._order_s:
            self._since_s, self._proved, self._overdue = None, False, False
            self._order_s = seen.order_s
        if not seen.barred:
            return []
        if self._since_s is None:
            self._since_s = now_s
        if self._proved:
            return []
        took_s = now_s - self._since_s
        fields = {"held_bytes": seen.held_bytes, "duty": seen.duty, "seconds": took_s}
        if seen.held_bytes == 0 and seen.duty <= 0:
            self._proved = True
            return [Said("stop_proved", {**fields, "in_time": took_s <= seen.deadline_s})]
        if took_s > seen.deadline_s and not self._overdue:
            self._overdue = True
            return [Said("stop_overdue", {**fields, "deadline_s": seen.deadline_s})]
        return []

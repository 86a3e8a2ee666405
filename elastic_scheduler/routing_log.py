"""Choices of replicas, as they can be asked about: by trajectory, or by one request of it."""

from collections import OrderedDict
from typing import NamedTuple

from elastic_scheduler.names import kept_name
from elastic_scheduler.reasons import ReasonLog
from elastic_scheduler.turn_need import TurnNeed

REQUESTS_KEPT = 65_536
LOG_BYTES = 64 << 20
# Of CPython's objects, measured: a decision, and each replica that was weighed for it.
DECISION_BYTES = 320
WEIGHED_BYTES = 104


class RoutingDecision(NamedTuple):
    """One choice: `replica` is None where the turn was told to wait; `weighed` is (id, cost_s)."""

    at_s: float
    request_id: str
    replica: str | None
    why: str
    expected_tokens: int
    is_long: bool
    weighed: tuple[tuple[str, float], ...]


class RoutingLog:
    """The last choices of each trajectory; a turn without one is its own."""

    def __init__(self) -> None:
        self._log: ReasonLog[RoutingDecision] = ReasonLog(
            weigh=_size_bytes, capacity_bytes=LOG_BYTES
        )
        self._trajectories: OrderedDict[str, str] = OrderedDict()

    def note(self, need: TurnNeed, decision: RoutingDecision) -> None:
        """Keep a choice; a turn that has neither session nor request id cannot be asked about."""
        trajectory = kept_name(need.session or need.request_id)
        if not trajectory:
            return
        self._log.note(trajectory, decision)
        if need.session and need.request_id:
            self._trajectories[kept_name(need.request_id)] = trajectory
            if len(self._trajectories) > REQUESTS_KEPT:
                self._trajectories.popitem(last=False)

    def of(self, subject: str) -> tuple[RoutingDecision, ...]:
        """Choices for a trajectory or a request id, oldest first; empty: none remembered."""
        trajectory = self._trajectories.get(kept_name(subject))
        if trajectory is None:
            return self._log.of(kept_name(subject))
        return tuple(each for each in self._log.of(trajectory) if each.request_id == subject)

    def waits(self, need: TurnNeed, why: str) -> bool:
        """Whether the last choice was this wait: turns that wait are looked at over and over."""
        noted = self._log.of(kept_name(need.session or need.request_id))
        mine = [each for each in noted if each.request_id == need.request_id][-1:]
        return any(last.replica is None and last.why == why for last in mine)


def _size_bytes(decision: RoutingDecision) -> int:
    text = decision.request_id
    names = (1 if text.isascii() else 4) * len(text)
    return DECISION_BYTES + names + WEIGHED_BYTES * len(decision.weighed)

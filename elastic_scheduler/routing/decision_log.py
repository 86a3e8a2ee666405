"""Log of decisions and their reasons, in bounded memory, so that operators can ask why.

`ReasonLog` keeps the last decisions about each subject. `RoutingLog` keeps choices of replicas, to
be asked for by trajectory or by request.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from elastic_scheduler.routing.cost import TurnNeed
from elastic_scheduler.routing.predictors import kept_name

D = TypeVar("D")

SUBJECTS_KEPT = 16_384
DECISIONS_KEPT = 16
REQUESTS_KEPT = 65_536
LOG_BYTES = 64 << 20
# Size of CPython's objects, measured: a decision, and each replica that was weighed for it.
DECISION_BYTES = 320
WEIGHED_BYTES = 104


@dataclass(frozen=True, slots=True)
class Reason:
    """Record of one decision about a subject: `what` was decided at `at_s`, and `why` in one line.

    figures: numbers of the decision, with units in their names.
    """

    at_s: float
    what: str
    why: str
    figures: dict[str, float] = field(default_factory=dict)


class ReasonLog(Generic[D]):
    """Log of the newest decisions about each subject; the least recent subjects are dropped.

    weigh: returns a decision's bytes; with it all decisions together have at most `capacity_bytes`.
    """

    def __init__(
        self,
        subjects: int = SUBJECTS_KEPT,
        decisions: int = DECISIONS_KEPT,
        weigh: Callable[[D], int] | None = None,
        capacity_bytes: int = 0,
    ) -> None:
        if min(subjects, decisions) < 1:
            raise ValueError("keep at least one subject and one decision of it")
        self._subjects = subjects
        self._decisions = decisions
        self._weigh = weigh
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._rings: OrderedDict[str, deque[D]] = OrderedDict()

    def note(self, subject: str, decision: D) -> None:
        """Add a decision about a subject, and drop old ones beyond the bounds."""
        ring = self._rings.get(subject)
        if ring is None:
            ring = self._rings[subject] = deque()
            if len(self._rings) > self._subjects:
                self._forget_oldest()
        else:
            self._rings.move_to_end(subject)
        ring.append(decision)
        if len(ring) > self._decisions:
            self._left(ring.popleft())
        if self._weigh is not None:
            self._bytes += self._weigh(decision)
            while self._bytes > self._capacity_bytes and len(self._rings) > 1:
                self._forget_oldest()

    @property
    def size_bytes(self) -> int:
        """Bytes of all decisions in the log, by `weigh`; 0 without it."""
        return self._bytes

    def _forget_oldest(self) -> None:
        for decision in self._rings.popitem(last=False)[1]:
            self._left(decision)

    def _left(self, decision: D) -> None:
        if self._weigh is not None:
            self._bytes -= self._weigh(decision)

    def of(self, subject: str) -> tuple[D, ...]:
        """Return the logged decisions about a subject, oldest first."""
        return tuple(self._rings.get(subject, ()))

    def __len__(self) -> int:
        return len(self._rings)


class RoutingDecision(NamedTuple):
    """Record of a router's choice for a turn; replica: None if the turn had to wait.

    weighed: the cheapest replicas as (id, seconds).
    """

    at_s: float
    request_id: str
    replica: str | None
    why: str
    expected_tokens: int
    is_long: bool
    weighed: tuple[tuple[str, float], ...]


class RoutingLog:
    """Log of the router's choices by trajectory; a turn without one has its request id."""

    def __init__(self) -> None:
        self._log: ReasonLog[RoutingDecision] = ReasonLog(
            weigh=_size_bytes, capacity_bytes=LOG_BYTES
        )
        self._trajectories: OrderedDict[str, str] = OrderedDict()

    def note(self, need: TurnNeed, decision: RoutingDecision) -> None:
        """Add a choice for a turn; one without session and request id is not logged."""
        trajectory = kept_name(need.session or need.request_id)
        if not trajectory:
            return
        self._log.note(trajectory, decision)
        if need.session and need.request_id:
            self._trajectories[kept_name(need.request_id)] = trajectory
            if len(self._trajectories) > REQUESTS_KEPT:
                self._trajectories.popitem(last=False)

    def of(self, subject: str) -> tuple[RoutingDecision, ...]:
        """Return the logged choices for a trajectory or a request id, oldest first."""
        trajectory = self._trajectories.get(kept_name(subject))
        if trajectory is None:
            return self._log.of(kept_name(subject))
        return tuple(each for each in self._log.of(trajectory) if each.request_id == subject)

    def waits(self, need: TurnNeed, why: str) -> bool:
        """Return True if the turn's last logged choice was to wait for the same reason.

        Waiting turns are tried again and again, and one record is enough.
        """
        noted = self._log.of(kept_name(need.session or need.request_id))
        mine = [each for each in noted if each.request_id == need.request_id][-1:]
        return any(last.replica is None and last.why == why for last in mine)


def _size_bytes(decision: RoutingDecision) -> int:
    text = decision.request_id
    names = (1 if text.isascii() else 4) * len(text)
    return DECISION_BYTES + names + WEIGHED_BYTES * len(decision.weighed)

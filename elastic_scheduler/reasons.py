"""Why was this decided? The last decisions about every subject, in bounded memory."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

D = TypeVar("D")

SUBJECTS_KEPT = 16_384
DECISIONS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Reason:
    """One decision: `what` was decided about a subject at `at_s`, and `why` in one line.

    `figures` are the numbers that it was decided by, with units in their names.
    """

    at_s: float
    what: str
    why: str
    figures: dict[str, float] = field(default_factory=dict)


class ReasonLog(Generic[D]):
    """A ring of decisions for each subject; subjects not decided about for longest go first.

    With `weigh`, which says a decision's bytes, all of them have at most `capacity_bytes` together.
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
        """Keep a decision."""
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
        """Bytes of all decisions, as `weigh` says."""
        return self._bytes

    def _forget_oldest(self) -> None:
        for decision in self._rings.popitem(last=False)[1]:
            self._left(decision)

    def _left(self, decision: D) -> None:
        if self._weigh is not None:
            self._bytes -= self._weigh(decision)

    def of(self, subject: str) -> tuple[D, ...]:
        """Decisions about a subject, oldest first; empty when none is remembered."""
        return tuple(self._rings.get(subject, ()))

    def __len__(self) -> int:
        return len(self._rings)

"""Why was this decided? The last decisions about every subject, in bounded memory."""

from collections import OrderedDict, deque
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
    """A ring of decisions for each subject; subjects not decided about for longest go first."""

    def __init__(self, subjects: int = SUBJECTS_KEPT, decisions: int = DECISIONS_KEPT) -> None:
        if min(subjects, decisions) < 1:
            raise ValueError("keep at least one subject and one decision of it")
        self._subjects = subjects
        self._decisions = decisions
        self._rings: OrderedDict[str, deque[D]] = OrderedDict()

    def note(self, subject: str, decision: D) -> None:
        """Keep a decision."""
        ring = self._rings.get(subject)
        if ring is None:
            ring = self._rings[subject] = deque(maxlen=self._decisions)
            if len(self._rings) > self._subjects:
                self._rings.popitem(last=False)
        else:
            self._rings.move_to_end(subject)
        ring.append(decision)

    def of(self, subject: str) -> tuple[D, ...]:
        """Decisions about a subject, oldest first; empty when none is remembered."""
        return tuple(self._rings.get(subject, ()))

    def __len__(self) -> int:
        return len(self._rings)

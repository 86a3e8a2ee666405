"""Journal: the newest decisions of this process, with their callers.

It gets the audit log's records. Leases begin and end by the thousand, so they are kept apart from
other decisions: neither kind pushes the other out.
"""

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

KEPT: Final = 500
MOST_CHARS: Final = 400
# Grants and ends of leases are counted by minute.
MINUTE_S: Final = 60.0
MINUTES: Final = 10

LEASE_EVENTS: Final = {
    "lease_granted": "granted",
    "lease_adopted": "adopted",
    "lease_releasing": "releasing",
    "lease_released": "released",
    "lease_expired": "expired",
    "lease_refused": "refused",
    "revoked": "revoked",
}
# Operators' requests as the audit log names them.
ASKED: Final = {
    "SetHarvestRequest": "harvest set",
    "ApplyPolicyRequest": "policy applied",
    "DeletePolicyRequest": "policy deleted",
    "EndJobRequest": "job ended",
    "DropJobRequest": "job dropped",
    "RegisterJobRequest": "job registered",
    "AnnounceVersionRequest": "version announced",
    "EndRunRequest": "run ended",
}
# Changes of what may be lent: pages show them at once. The request says whose they are.
ACTS: Final = frozenset({"SetHarvestRequest", "ApplyPolicyRequest", "DeletePolicyRequest"})
# Fields of a record that pages show, in this order; all others stay in the audit log.
_TOLD: Final = (
    "mode", "would", "policy", "job", "replica", "version", "parent", "run", "epoch", "reason",
    "why", "message", "method", "answer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Record of one decision. at_s: Unix seconds; by: caller, "" for the process's own decision.

    said: the decision's fields as text.
    """

    at_s: float
    event: str
    by: str
    node: str
    said: str

    @property
    def is_of_lease(self) -> bool:
        """True if the event began or ended a lease."""
        return self.event in LEASE_EVENTS

    @property
    def is_act(self) -> bool:
        """True if an operator changed what may be lent: a mode or a policy."""
        return self.event in ACTS

    @property
    def what(self) -> str:
        """Name of the event in words."""
        return ASKED.get(self.event) or self.event.replace("_", " ")

    @property
    def caller(self) -> str:
        """Name of the caller in words; `the scheduler` for its own decisions."""
        asked = self.event in ASKED
        return self.by or ("a caller without a certificate" if asked else "the scheduler")


@dataclass(frozen=True, slots=True)
class JournalContent:
    """Records of the journal at one moment: decisions and lease events, newest first.

    minutes: number of lease events of each kind, for each of the last ten minutes.
    """

    decisions: tuple[JournalEntry, ...] = ()
    leases: tuple[JournalEntry, ...] = ()
    minutes: tuple[Mapping[str, int], ...] = ()

    @property
    def last_act(self) -> JournalEntry | None:
        """Newest operator's change of what may be lent, None if there is none."""
        return next((each for each in self.decisions if each.is_act), None)

    def sum_of(self, how: str) -> int:
        """Return the number of leases `granted`, `released` and so on in the last ten minutes."""
        return sum(minute.get(how, 0) for minute in self.minutes)


class Journal:
    """The newest 500 decisions and the newest 500 lease events, fed with the audit log's records.

    It may be used from any thread.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._lock = threading.Lock()
        self._decisions: deque[JournalEntry] = deque(maxlen=kept)
        self._leases: deque[JournalEntry] = deque(maxlen=kept)
        self._minutes: deque[tuple[int, Counter[str]]] = deque(maxlen=MINUTES + 1)

    def heard(self, event: str, fields: Mapping[str, object], by: str, at_s: float) -> bool:
        """Add a record; return True if pages should show it at once. by: the caller."""
        node = str(fields.get("node", ""))[:MOST_CHARS]
        decision = JournalEntry(at_s, event, by[:MOST_CHARS], node, _said(event, fields))
        with self._lock:
            if decision.is_of_lease:
                self._leases.appendleft(decision)
                self._count(LEASE_EVENTS[event], at_s)
            else:
                self._decisions.appendleft(decision)
        return decision.is_act

    def read(self, now_s: float) -> JournalContent:
        """Return all records, with counts of lease events in the ten minutes until `now_s`."""
        first = int(now_s // MINUTE_S) - MINUTES
        with self._lock:
            return JournalContent(
                tuple(self._decisions),
                tuple(self._leases),
                tuple(dict(counts) for minute, counts in self._minutes if minute > first),
            )

    def _count(self, how: str, at_s: float) -> None:
        minute = int(at_s // MINUTE_S)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, Counter()))
        self._minutes[-1][1][how] += 1


def _said(event: str, fields: Mapping[str, object]) -> str:
    parts = []
    for name in _TOLD:
        value = fields.get(name)
        if value in (None, ""):
            continue
        if name == "answer" and event != "SetHarvestRequest":
            continue
        if name == "policy" and isinstance(value, Mapping):
            value = value.get("name", "")
        label = "released" if name == "answer" else name
        parts.append(f"{label} {str(value)[:MOST_CHARS]}")
    return ", ".join(parts)[:MOST_CHARS]

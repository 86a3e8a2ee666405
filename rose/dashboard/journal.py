"""Journal: the newest decisions of this process, with their callers.

It gets the audit log's records. Leases begin and end by the thousand and versions come all day, so
these are kept apart from other decisions: no kind pushes another out.
"""

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
# Requests of which the core's record, of the same caller, says the same.
RECORDED: Final = frozenset(
    f"{name}Request"
    for name in ("ApplyPolicy", "DeletePolicy", "EndJob", "DropJob", "AnnounceVersion", "EndRun")
)
VERSION: Final = "version_announced"
# Other requests, as the audit log names them.
ASKED: Final = {"SetHarvestRequest": "harvest set", "RegisterJobRequest": "job registered"}
# Changes of what may be lent: pages show them at once.
ACTS: Final = frozenset({"SetHarvestRequest", "policy_applied", "policy_deleted"})
# Fields of a record that pages show, in this order; all others stay in the audit log.
_TOLD: Final = (
    "mode", "would", "policy", "job", "replica", "version", "parent", "run", "epoch", "reason",
    "why", "message", "method", "answer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Record of one decision. at_s: Unix seconds; by: caller, "" for the process's own decision.

    said: the decision's fields as text. about: its job, policy or replica. times: number of such
    decisions since `since_s`, where repeats are folded into the newest.
    """

    at_s: float
    event: str
    by: str
    node: str
    said: str
    about: str = ""
    times: int = 1
    since_s: float = 0.0

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
        asked = self.is_act or self.event in ASKED or self.event == VERSION
        return self.by or ("a caller without a certificate" if asked else "the scheduler")


@dataclass(frozen=True, slots=True)
class JournalContent:
    """Records of the journal at one moment: decisions, lease events, versions; the newest first.

    minutes: number of lease events of each kind, for each of the last ten minutes.
    """

    decisions: tuple[JournalEntry, ...] = ()
    leases: tuple[JournalEntry, ...] = ()
    versions: tuple[JournalEntry, ...] = ()
    minutes: tuple[Mapping[str, int], ...] = ()

    @property
    def last_act(self) -> JournalEntry | None:
        """Newest operator's change of what may be lent, None if there is none."""
        return next((each for each in self.decisions if each.is_act), None)

    def sum_of(self, how: str) -> int:
        """Return the number of leases `granted`, `released` and so on in the last ten minutes."""
        return sum(minute.get(how, 0) for minute in self.minutes)


class Journal:
    """The newest 500 decisions, lease events and versions each, fed with the audit log's records.

    It may be used from any thread.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._lock = threading.Lock()
        self._decisions: deque[JournalEntry] = deque(maxlen=kept)
        self._leases: deque[JournalEntry] = deque(maxlen=kept)
        self._versions: deque[JournalEntry] = deque(maxlen=kept)
        self._minutes: deque[tuple[int, Counter[str]]] = deque(maxlen=MINUTES + 1)

    def heard(self, event: str, fields: Mapping[str, object], by: str, at_s: float) -> bool:
        """Add a record; return True if pages should show it at once. by: the caller."""
        if event in RECORDED:
            return False
        policy = fields.get("policy")
        if isinstance(policy, Mapping):
            fields = {**fields, "policy": policy.get("name", "")}
        node = str(fields.get("node", ""))[:MOST_CHARS]
        about = next((str(fields[n]) for n in ("job", "policy", "replica") if fields.get(n)), "")
        said = _said(event, fields)
        decision = JournalEntry(at_s, event, by[:MOST_CHARS], node, said, about[:MOST_CHARS])
        with self._lock:
            if event in LEASE_EVENTS:
                self._leases.appendleft(decision)
                self._count(LEASE_EVENTS[event], at_s)
            else:
                (self._versions if event == VERSION else self._decisions).appendleft(decision)
        return decision.is_act

    def read(self, now_s: float) -> JournalContent:
        """Return all records, with counts of lease events in the ten minutes until `now_s`."""
        first = int(now_s // MINUTE_S) - MINUTES
        with self._lock:
            return JournalContent(
                tuple(self._decisions),
                tuple(self._leases),
                tuple(self._versions),
                tuple(dict(counts) for minute, counts in self._minutes if minute > first),
            )

    def _count(self, how: str, at_s: float) -> None:
        minute = int(at_s // MINUTE_S)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, Counter()))
        self._minutes[-1][1][how] += 1


def folded(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Return the entries, newest first, with repeats folded into the newest of their kind.

    A repeat has the same event, caller, node and subject; operators' changes are never folded.
    """
    found: dict[tuple[object, ...], JournalEntry] = {}
    for number, each in enumerate(entries):
        act = number if each.is_act else None
        key = each.event, each.by, each.node, each.about, act
        first = found.setdefault(key, replace(each, times=0))
        found[key] = replace(first, times=first.times + 1, since_s=each.at_s)
    return list(found.values())


def _said(event: str, fields: Mapping[str, object]) -> str:
    parts = []
    for name in _TOLD:
        value = fields.get(name)
        if value in (None, ""):
            continue
        if name == "answer" and event != "SetHarvestRequest":
            continue
        label = "released" if name == "answer" else name
        parts.append(f"{label} {str(value)[:MOST_CHARS]}")
    return ", ".join(parts)[:MOST_CHARS]

"""Status of an object: its conditions, figures and limits, from the scheduler's view.

    object, refusal or view of its policy, wall time ──> PolicyStatus

A condition keeps its time of transition while its status is the same. `is_news` decides whether a
status has to be written at once: conditions and generations do, figures can wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import PolicyMode, PolicyStatus, StopPolicy
from elastic_scheduler.capacity.crd import (
    GROUP,
    KIND,
    VERSION,
    Condition,
    ConditionType,
    PolicyLimit,
    PolicySummary,
)
from rose.scheduler.core.observed import PolicyView

Object = Mapping[str, Any]
"""Object of the Kubernetes API server, as its parsed JSON."""
MAX_MESSAGE: Final = 1_024
MAX_DETAIL: Final = 256
MAX_LIMITS: Final = 32
NAMED: Final = 3
# Events of objects without a namespace are in this one.
EVENTS_IN: Final = "default"
TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"

INVALID, REFUSED = "Invalid", "Refused"
# Reasons that need an operator's attention.
WARNINGS: Final = frozenset(
    {INVALID, REFUSED, "CanaryHalted", "BudgetSpent", "Stale", "LimitedByOther", "Pending"}
)


@dataclass(frozen=True, slots=True)
class ObjectRefusal:
    """Reason why an object is not in force: it is invalid, or may not be applied."""

    reason: str
    line: str


Said = tuple[str, str, str]
"""Status, reason and message of a condition."""


def judged(
    each: Object, refusal: ObjectRefusal | None, view: PolicyView | None, wall_s: float
) -> PolicyStatus:
    """Return the status to write for an object, with its conditions, figures and limits.

    refusal: why the object is not in force as it is, else None. view: status of the policy in force
    that the object last defined, None without one. wall_s: Unix seconds.
    """
    generation = int(each["metadata"].get("generation", 0))
    before = {said.get("type"): said for said in _conditions(each)}
    conditions = []
    for kind, judge in _JUDGES.items():
        status, reason, message = judge(refusal, view)
        old = before.get(kind, {})
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        conditions.append(
            Condition(
                type=kind,
                status=status,
                observed_generation=generation,
                last_transition_time=since or _at(wall_s),
                reason=reason,
                message=message[:MAX_MESSAGE],
            )
        )
    return PolicyStatus(
        observed_generation=generation,
        summary=_summary(view) if view else PolicySummary(),
        limited_by=tuple(_limits(view)) if view else (),
        conditions=tuple(conditions),
    )


def dumped(status: PolicyStatus) -> dict[str, Any]:
    """Return a status as the JSON that the API server takes."""
    return status.model_dump(mode="json", by_alias=True)


def differs(each: Object, status: Mapping[str, Any]) -> bool:
    """Return True if the object's own status differs from this one."""
    return dict(each.get("status") or {}) != status


def is_news(each: Object, status: Mapping[str, Any]) -> bool:
    """Return True if a status must be written at once: a condition or a generation differs.

    Changed figures and messages alone can wait.
    """
    old = each.get("status") or {}
    return _sharp(old) != _sharp(status)


def _sharp(status: Mapping[str, Any]) -> list[object]:
    said = status.get("conditions") or ()
    keys = ("type", "status", "reason", "observedGeneration")
    return [status.get("observedGeneration"), *([each.get(k) for k in keys] for each in said)]


def events_of(each: Object, status: PolicyStatus, wall_s: float) -> Iterator[dict[str, Any]]:
    """Yield Kubernetes events for conditions that differ from the object's own status.

    An event's name comes from its change, so that one written twice, by two leaders or after a lost
    answer, exists once.
    """
    before = {said.get("type"): said for said in _conditions(each)}
    for now in status.conditions:
        old = before.get(now.type)
        same = old is not None and (old.get("status"), old.get("reason")) == (
            now.status,
            now.reason,
        )
        # The first condition of a new object says enough.
        if same or (old is None and now.type != ConditionType.READY):
            continue
        yield _event(each, now, wall_s)


def _event(each: Object, now: Condition, wall_s: float) -> dict[str, Any]:
    metadata = each["metadata"]
    of = (metadata.get("uid"), metadata.get("resourceVersion"), now.type, now.status, now.reason)
    name = blake2b(repr(of).encode(), digest_size=8).hexdigest()
    at = _at(wall_s)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name'][:200]}.{name}", "namespace": EVENTS_IN},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": metadata["name"],
            "uid": metadata.get("uid"),
        },
        "type": "Warning" if now.reason in WARNINGS else "Normal",
        "reason": now.reason,
        "message": f"{now.type} is {now.status}: {now.message}"[:MAX_MESSAGE],
        "source": {"component": "rose-scheduler"},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


# ---- conditions ----


def _ready(refusal: ObjectRefusal | None, view: PolicyView | None) -> Said:
    if refusal is not None:
        kept = "; what it said before is held" if view else ""
        return FALSE, refusal.reason, refusal.line + kept
    if view is None:
        return FALSE, "Pending", "the scheduler has not stored it yet"
    return TRUE, *_state(view)


_MODES: Final = {
    None: ("Bounds", "it has no mode, and bounds what other policies allow"),
    PolicyMode.ADVISORY: ("Advisory", "it lends nothing, and says what it would lend"),
}


def _state(view: PolicyView) -> tuple[str, str]:
    """Return the policy's present state as a word and a line."""
    policy = view.policy
    if view.halted:
        return "CanaryHalted", f"{view.halted}; change the spec, say canary.percent, to go on"
    if policy.mode is PolicyMode.OFF:
        return "Off", "its nodes lend nothing"
    if view.stop is not HarvestMode.ACTIVE:
        word = "Held" if view.stop is HarvestMode.HOLD else "Draining"
        return word, f"the operator's stop: {view.stop.value}; `rose resume` ends it"
    if policy.stop_policy is not StopPolicy.NONE:
        word = "Held" if policy.stop_policy is StopPolicy.HOLD else "Draining"
        return word, f"its stopPolicy is {policy.stop_policy.value}"
    if not view.nodes:
        if policy.is_timed:
            return "NotNow", "it counts on no node now: look at its from, until and during"
        return "NoNodesSelected", policy.node_selector.no_nodes()
    for kind, word in (("blackout", "Blackout"), ("slo_budget", "BudgetSpent")):
        count, example = view.limits.get(kind, (0, ""))
        if count == view.nodes:
            return word, f"on all of its {count} nodes: {example}"
    return _MODES.get(policy.mode) or ("Active", f"{view.lending} of {view.nodes} nodes lend")


def _fresh(refusal: ObjectRefusal | None, view: PolicyView | None) -> Said:
    del refusal
    if view is None or not (view.nodes or view.silent):
        return UNKNOWN, "Missing", "no node of it is attached"
    if view.silent:
        return FALSE, "Stale", f"{len(view.silent)} nodes are silent: {_named(view.silent)}"
    return TRUE, "Fresh", f"{view.nodes} nodes are heard"


def _conflicted(refusal: ObjectRefusal | None, view: PolicyView | None) -> Said:
    del refusal
    if view is None:
        return UNKNOWN, "Missing", "it is not in force"
    if not view.stricter:
        return FALSE, "None", "no other policy is stricter in what it sets"
    ordered = sorted(view.stricter.items(), key=lambda pair: (-pair[1], pair[0]))
    said = [f"{whose} in {path} on {count} nodes" for (whose, path), count in ordered[:8]]
    return TRUE, "LimitedByOther", f"stricter is {'; '.join(said)}"


def _enforced(refusal: ObjectRefusal | None, view: PolicyView | None) -> Said:
    if view is None or not (view.nodes or view.silent):
        return UNKNOWN, "Missing", "no node of it is attached"
    count = view.seen + len(view.behind) + len(view.silent)
    if refusal is not None:
        return FALSE, "Pending", "the object is not in force as it is"
    if view.behind:
        node, why = min(view.behind.items())
        return FALSE, "Pending", f"observed on {view.seen} of {count} nodes; {node}: {why}"
    if view.silent:
        stale = f"{view.policy.stale_after_s:g} s"
        message = f"observed on {view.seen} of {count} nodes; {_named(view.silent)}: silent, so it"
        return UNKNOWN, "Silent", f"{message} lends nothing from staleAfter ({stale}) on"
    return TRUE, "Observed", f"observed on all of its {view.nodes} nodes"


_JUDGES: Final[dict[str, Callable[[ObjectRefusal | None, PolicyView | None], Said]]] = {
    ConditionType.READY: _ready,
    ConditionType.TELEMETRY_FRESH: _fresh,
    ConditionType.CONFLICTED: _conflicted,
    ConditionType.ENFORCED: _enforced,
}


# ---- figures ----


def _summary(view: PolicyView) -> PolicySummary:
    return PolicySummary(
        nodes=f"{view.lending}/{view.nodes}",
        silent=len(view.silent),
        lent_bytes=view.lent_bytes,
        would_lend_bytes=view.would_lend_bytes,
        would_lend_compute=round(view.would_lend_compute, 2),
    )


def _limits(view: PolicyView) -> Iterator[PolicyLimit]:
    ordered = sorted(view.limits.items(), key=lambda pair: (-pair[1][0], pair[0]))
    for kind, (count, example) in ordered[:MAX_LIMITS]:
        yield PolicyLimit(limit=kind, nodes=count, detail=example[:MAX_DETAIL])


def _named(nodes: Iterable[str]) -> str:
    names = sorted(nodes)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _conditions(each: Object) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = (each.get("status") or {}).get("conditions") or []
    return found


def _at(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

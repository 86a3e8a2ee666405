"""Effective policy of a node, and its advice in figures.

    policies ── match the node's name and labels ──> each field's strictest value, and its policy
    verdict, KV memory of guests, busy share of the host ──> bytes, share of compute ──> sums

Of all policies that match a node the strictest wins, field by field. A node that no policy matches
lends nothing, and advises by the defaults; `decided_by` says so.

Advice is the capacity that a node would lend by its policies, now and since it attached. Memory is
the KV memory of its guests, at most `maxHarvest.memory`; compute the share of time in which its
host is idle, at most `maxHarvest.compute`. Both are 0 while the verdict does not lend. A busy
host's slack (`slackShare`) is unknown: it would come on top. A figure that a node does not report
is None, and adds nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import attrgetter, neg, pos
from typing import Any, Final

from pydantic.alias_generators import to_snake

from elastic_scheduler.capacity.policy import (
    LEASE_TTL_S,
    CapacityPolicy,
    DailyWindow,
    MaxHostBusy,
    PolicyMode,
    SloBudget,
    StopPolicy,
    TenantLimit,
    Watermarks,
)
from elastic_scheduler.leases.lease_table import HarvestMode

NO_POLICY: Final = "no policy matches this node"
NO_MODE: Final = "no policy has a mode"
_DEFAULTS: Final = CapacityPolicy(name="none")
_MODES: Final = tuple(PolicyMode)
_STOPS: Final = tuple(StopPolicy)
PATHS: Final[Mapping[str, str]] = {
    "mode": "mode",
    "stopPolicy": "stop_policy",
    "maxHarvest.compute": "compute",
    "maxHarvest.memory": "memory_bytes",
    "maxHarvest.nodes": "node_caps",
    "maxHarvest.guests": "guest_caps",
    "maxHarvest.deploymentShare": "deployment_share",
    "reserve.kvHeadroom": "kv_headroom",
    "slackShare": "slack_share",
    "watermarks": "watermarks",
    "cooldown": "cooldown_s",
    "blackoutWindows": "blackouts",
    "allowedWindows": "allowed",
    "tenants": "tenants",
    "canary.percent": "canary_percent",
    "staleAfter": "stale_after_s",
    "reclaimDeadline": "reclaim_deadline_s",
    "maxHostBusy": "max_host_busy",
    "sloBudget": "slo_budget",
}
_BUCKETS: Final = 1 << 32
# Longer gaps between a scheduler's judgements were a pause, and count for nothing.
MOST_STEP_S = 10.0


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """Policy in force for one node: each field's strictest value among the matching policies.

    None means that no policy bounds the field. policies: names of those that match. decided_by: the
    policy behind each bounded field, by the field's path in files. All windows, caps on counts and
    tenants hold, so they are listed with their policies.
    """

    policies: tuple[str, ...] = ()
    mode: PolicyMode = PolicyMode.OFF
    stop_policy: StopPolicy = StopPolicy.NONE
    compute: float | None = None
    memory_bytes: int | None = None
    node_caps: tuple[tuple[str, int | str], ...] = ()
    guest_caps: tuple[tuple[str, int], ...] = ()
    deployment_share: float | None = None
    kv_headroom: float = 0.0
    slack_share: float | None = None
    watermarks: Watermarks | None = None
    cooldown_s: float = 0.0
    blackouts: tuple[tuple[str, DailyWindow], ...] = ()
    allowed: tuple[tuple[str, DailyWindow], ...] = ()
    tenants: tuple[tuple[str, TenantLimit], ...] = ()
    canary_percent: float = 100.0
    stale_after_s: float = LEASE_TTL_S
    reclaim_deadline_s: float | None = None
    max_host_busy: MaxHostBusy | None = None
    slo_budget: SloBudget | None = None
    decided_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_caps(self) -> bool:
        """True if the node itself has to keep within caps on memory or compute."""
        caps = (self.compute, self.memory_bytes, self.slack_share, self.watermarks)
        return self.kv_headroom > 0 or any(cap is not None for cap in caps)

    def fields(self) -> list[tuple[str, str, str]]:
        """Return path, value and policy of each bounded field, as texts for people."""
        return [
            (path, _shown(getattr(self, name)), self.decided_by.get(path, ""))
            for path, name in PATHS.items()
            if path in self.decided_by
        ]


def _shown(value: object) -> str:
    if isinstance(value, Watermarks):
        return f"high {value.high:g}, low {value.low:g}"
    if isinstance(value, MaxHostBusy):
        return f"{value.share:g} over {value.over_s:g} s, again below {value.resume:g}"
    if isinstance(value, SloBudget):
        return f"objective {value.objective:g}, at least {value.min_bad} missed"
    if isinstance(value, TenantLimit):
        most = "" if value.max_guests is None else f", at most {value.max_guests} guests"
        return f"{value.job}: priority {value.priority:g}{most}"
    if isinstance(value, tuple):
        return "; ".join(f"{_shown(each)} ({name})" for name, each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# Fields whose strictest value holds: the key by which the strictest is the least, and the value
# where no policy sets one.
_STRICTEST: Final[Mapping[str, tuple[Callable[[Any], Any], Any]]] = {
    "mode": (_MODES.index, PolicyMode.ADVISORY),
    "stopPolicy": (lambda stop: -_STOPS.index(stop), StopPolicy.NONE),
    "maxHarvest.compute": (pos, None),
    "maxHarvest.memory": (pos, None),
    "maxHarvest.deploymentShare": (pos, None),
    "reserve.kvHeadroom": (neg, 0.0),
    "slackShare": (pos, None),
    "watermarks": (lambda marks: (marks.high, marks.low), None),
    "cooldown": (neg, 0.0),
    "canary.percent": (pos, 100.0),
    "staleAfter": (pos, LEASE_TTL_S),
    "reclaimDeadline": (pos, None),
    "maxHostBusy": (lambda busy: (busy.share, busy.resume, busy.over_s), None),
    # The higher objective allows fewer misses, and fewer misses are needed to count.
    "sloBudget": (lambda slo: (-slo.objective, slo.min_bad, -slo.release_after_s), None),
}
# A policy's own value of each field.
_VALUE_OF: Final = {
    path: attrgetter(to_snake(path) if "." in path or path not in _STRICTEST else name)
    for path, name in PATHS.items()
}


def _listed(path: str, policies: Sequence[CapacityPolicy]) -> Iterator[tuple[str, Any]]:
    """Yield all values of a field that policies set, each with its policy's name."""
    for policy in policies:
        value = _VALUE_OF[path](policy)
        for each in value if isinstance(value, tuple) else () if value is None else (value,):
            yield policy.name, each


def effective(
    policies: Iterable[CapacityPolicy], node: str, labels: Mapping[str, str]
) -> EffectivePolicy:
    """Return the effective policy of a node: the strictest of all policies that match, by field.

    A node that no policy matches advises, by the defaults of a policy.
    """
    matching = tuple(
        sorted(
            (policy for policy in policies if policy.node_selector.matches(node, labels)),
            key=lambda policy: policy.name,
        )
    )
    if not matching:
        advice = effective([_DEFAULTS], node, labels)
        # Its deadline stays the node's own.
        return replace(advice, policies=(), decided_by={"mode": NO_POLICY}, reclaim_deadline_s=None)
    decided, found = {"mode": NO_MODE}, dict[str, Any]()
    for path, name in PATHS.items():
        if path not in _STRICTEST:
            found[name] = listed = tuple(_listed(path, matching))
            if listed:
                decided[path] = ", ".join(dict.fromkeys(whose for whose, _ in listed))
            continue
        strictness, default = _STRICTEST[path]
        said = ((_VALUE_OF[path](policy), policy.name) for policy in matching)
        bound = [pair for pair in said if pair[0] is not None]
        value, whose = min(bound, key=lambda pair: strictness(pair[0]), default=(default, ""))
        found[name] = value
        if bound and (value != default or path == "mode"):
            decided[path] = whose
    if found["watermarks"] is not None:
        lows = [policy.watermarks.low for policy in matching if policy.watermarks is not None]
        found["watermarks"] = Watermarks(high=found["watermarks"].high, low=min(lows))
    return EffectivePolicy(tuple(policy.name for policy in matching), **found, decided_by=decided)


def in_canary(node: str, percent: float) -> bool:
    """Return True if the node is in the `percent` of all names that act in a policy's canary.

    It is decided by a hash of the name: no order of arrival or restart changes it, and each larger
    percentage contains the smaller one.
    """
    return rank_of(node) < percent / 100 * _BUCKETS


def rank_of(node: str) -> int:
    """Return a hash of the node's name, 0 to 2^32 - 1, which orders nodes the same everywhere."""
    return int.from_bytes(blake2b(node.encode(), digest_size=4).digest(), "big")


@dataclass(frozen=True, slots=True)
class Lendable:
    """Capacity that a node lends or would lend: bytes of KV memory, and share of each second.

    None means unknown.
    """

    memory_bytes: int | None = None
    compute: float | None = None


NOTHING = Lendable(0, 0.0)


def lendable(
    would: HarvestMode, policy: EffectivePolicy, guest_bytes: int | None, busy: float | None
) -> Lendable:
    """Return the memory and compute that a node lends under its verdict's mode and its policy.

    Both are 0 unless the mode is ACTIVE. guest_bytes: KV memory of its guests. busy: busy share of
    its host. None means unknown.
    """
    if would is not HarvestMode.ACTIVE:
        return NOTHING
    memory, compute = guest_bytes, None if busy is None else max(0.0, 1.0 - busy)
    if memory is not None and policy.memory_bytes is not None:
        memory = min(memory, policy.memory_bytes)
    if compute is not None and policy.compute is not None:
        compute = min(compute, policy.compute)
    return Lendable(memory, compute)


@dataclass(slots=True)
class Advice:
    """Capacity that one node lends or would lend: now, and summed over `over_s` seconds."""

    now: Lendable = field(default_factory=Lendable)
    over_s: float = 0.0
    byte_s: float = 0.0
    compute_s: float = 0.0


class AdviceBook:
    """Advice on each node's lendable capacity. Times are monotonic seconds passed in."""

    def __init__(self) -> None:
        self._guest_bytes: dict[str, int] = {}
        self._of: dict[str, Advice] = {}
        self._judged_s: float | None = None

    def heard(self, node: str, guest_bytes: int) -> None:
        """Record the bytes of KV memory that a node's guests have when all of it is lent."""
        self._guest_bytes[node] = guest_bytes

    def forget(self, node: str) -> None:
        """Delete the advice of a lost node."""
        self._guest_bytes.pop(node, None)
        self._of.pop(node, None)

    def judged(
        self,
        verdicts: Iterable[tuple[str, HarvestMode, EffectivePolicy]],
        busy: Callable[[str], float | None],
        now_s: float,
    ) -> None:
        """Add the time since the last call to each node's sums, then set the new figures.

        verdicts: node, mode that it would have, and policy. busy: returns a host's busy share.
        """
        since_s = now_s - self._judged_s if self._judged_s is not None else 0.0
        step_s = min(max(0.0, since_s), MOST_STEP_S)
        self._judged_s = now_s
        for node, would, policy in verdicts:
            advice = self._of.get(node)
            if advice is None:
                advice = self._of[node] = Advice()
            else:
                advice.over_s += step_s
                advice.byte_s += step_s * (advice.now.memory_bytes or 0)
                advice.compute_s += step_s * (advice.now.compute or 0.0)
            advice.now = lendable(would, policy, self._guest_bytes.get(node), busy(node))

    def of(self, node: str) -> Advice:
        """Return a node's advice, an empty one before its first verdict."""
        return self._of.get(node) or Advice()

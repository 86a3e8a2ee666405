"""Status of each capacity policy on its nodes: the read model of a policy.

    Observed ──> one view a policy, made in one walk over all nodes

A node's word counts while it is heard within the policy's `staleAfter`. A stop is not done before
the node has measured that nothing is left, so a node is `behind` until then.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from elastic_scheduler import HarvestMode, ReplicaKind
from elastic_scheduler.capacity import CapacityPolicy, EffectivePolicy, Limit, effective
from elastic_scheduler.capacity.effective import PATHS
from elastic_scheduler.capacity.policy import NodeSelector
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.capacity import MOST_BYTES
from rose.scheduler.core.observed import NodeSeen, Observed

# All of these hold together: none of them is stricter than another.
JOINED: Final = frozenset({"maxHarvest.nodes", "blackoutWindows", "tenants"})
DRAINS: Final = (HarvestMode.OFF, HarvestMode.HOLD_AND_DRAIN)


@dataclass(slots=True)
class PolicyView:
    """A policy in force, and its nodes.

    stop: the operator's, which stands above all policies. nodes: attached and selected. lending:
    of them, with a live lease of a guest. silent: not heard within `staleAfter`, those that are not
    attached included, with seconds since. behind: nodes that do not keep within it yet, and why.
    seen: nodes that were seen to keep within it.
    limits: nodes that each kind of reason holds back, and one of the reasons in full. stricter:
    nodes on which another policy decides a field that this one sets, by (policy, field).
    modes: nodes by what holds on them, the stop included.
    """

    policy: CapacityPolicy
    of_object: bool
    stop: HarvestMode
    halted: str | None = None
    nodes: int = 0
    lending: int = 0
    seen: int = 0
    lent_bytes: int = 0
    would_lend_bytes: int = 0
    would_lend_compute: float = 0.0
    silent: dict[str, float] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)
    limits: dict[str, tuple[int, str]] = field(default_factory=dict)
    stricter: Counter[tuple[str, str]] = field(default_factory=Counter)
    modes: Counter[HarvestMode] = field(default_factory=Counter)


def policy_views(seen: Observed) -> dict[str, PolicyView]:
    """Return the views of all policies in force, by name."""
    views = {
        policy.name: PolicyView(
            policy, policy.name in seen.of_objects, seen.stop, seen.halted.get(policy.name)
        )
        for policy in seen.policies
    }
    alone = {name: _alone(view.policy) for name, view in views.items()}
    for node in seen.nodes:
        verdict, advice = node.verdict, node.advice.now
        guests = node.telemetry.guests
        lent = sum(guest.kv_bytes for guest in guests if guest.replica in node.leased)
        why = _behind(node)
        for name in verdict.policy.policies:
            view = views.get(name)
            if view is None:
                continue
            view.nodes += 1
            view.modes[node.mode] += 1
            view.lending += bool(node.leased)
            view.lent_bytes += min(lent, MOST_BYTES)
            view.would_lend_bytes += advice.memory_bytes or 0
            view.would_lend_compute += advice.compute or 0.0
            _limit(view, verdict.limits)
            view.stricter.update(_stricter(name, alone[name], verdict.policy))
            if node.silent_s > view.policy.stale_after_s:
                view.silent[node.node] = node.silent_s
            elif why:
                view.behind[node.node] = why
            else:
                view.seen += 1
    for away in seen.away:
        for view in views.values():
            if view.policy.node_selector.matches(away.node, away.labels):
                view.silent[away.node] = away.away_s
    return views


def _behind(node: NodeSeen) -> str:
    """Return why a node does not obey yet, "" if it does."""
    if not node.verdict.settled:
        return "other nodes are not counted yet"
    if node.mode in DRAINS and node.leased:
        return f"{min(node.leased)} is being given back"
    kinds = {offer.replica: offer.kind for offer in node.offers}
    if node.mode is HarvestMode.OFF:
        for guest in node.telemetry.guests:
            if kinds.get(guest.replica) is not ReplicaKind.DEDICATED and _is_there(guest):
                return f"{guest.replica} is {guest.state} and holds {guest.held_bytes} bytes"
    return ""


def _is_there(guest: pb.GuestTelemetry) -> bool:
    return bool(guest.held_bytes or guest.duty > 0 or guest.state in ("healthy", "starting"))


def _limit(view: PolicyView, limits: Iterable[Limit]) -> None:
    """Count a node once for each kind of reason; one of the words is kept."""
    said = {limit.kind.value: limit.text for limit in limits}
    if view.stop is not HarvestMode.ACTIVE:
        said["operator"] = f"the operator's stop: {view.stop.value}"
    for kind, limit in said.items():
        count, example = view.limits.get(kind, (0, limit))
        view.limits[kind] = count + 1, min(example, limit)


def _alone(policy: CapacityPolicy) -> dict[str, object]:
    """Return the values of the fields that this policy sets, as if no other policy existed."""
    everywhere = policy.model_copy(update={"node_selector": NodeSelector()})
    found = effective((everywhere,), "", {})
    said = policy.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {
        path: getattr(found, name)
        for path, name in PATHS.items()
        if path not in JOINED and (path == "mode" or _says(said, path))
    }


def _says(said: Mapping[str, object], path: str) -> bool:
    first, _, second = path.partition(".")
    inner = said.get(first)
    return inner is not None and (not second or (isinstance(inner, Mapping) and second in inner))


def _stricter(
    name: str, alone: Mapping[str, object], policy: EffectivePolicy
) -> Iterable[tuple[str, str]]:
    if len(policy.policies) < 2:
        return []
    return [
        (policy.decided_by.get(path, ""), path)
        for path, value in alone.items()
        if getattr(policy, PATHS[path]) != value and policy.decided_by.get(path) != name
    ]

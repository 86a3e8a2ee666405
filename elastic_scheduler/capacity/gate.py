"""Capacity gate: which nodes may lend now, why not, and what one in mode Advisory would do.

    policies, stop state, labels, budgets, busy shares, wall time ──> a verdict for each node
    verdicts, offers, leases ──> which leases to grant, renew and give back

The ladder of a node's verdict, the first that applies:

    no policy, mode Off                            nothing is lent, its guests end
    outside the canary, canary halted              as a policy in mode Advisory
    Advisory                                       nothing is lent; Active's verdict is reported
    beyond maxHarvest.nodes or deploymentShare     nothing is lent, its guests end
    blackout, SLO budget, busy host, HoldAndDrain  nothing new is lent, lent capacity is returned
    Hold, a policy that is withheld                nothing new is lent
    otherwise                                      lent within the caps

The operator's stop state (`HarvestModes`) stands above all of it: the stricter of both holds.
Dedicated replicas belong to the jobs and are leased in any case.
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from elastic_scheduler.capacity.budget_hold import BudgetHold, BusyHold, HoldChange
from elastic_scheduler.capacity.effective import (
    NO_POLICY,
    EffectivePolicy,
    effective,
    in_canary,
    rank_of,
)
from elastic_scheduler.capacity.policy import CapacityPolicy, PolicyMode, StopPolicy, most_of
from elastic_scheduler.errors import PolicyError
from elastic_scheduler.leases.lease_table import (
    HarvestMode,
    HarvestModes,
    HarvestPlan,
    Lease,
    LeaseState,
    Offer,
    ReplicaKind,
    stricter,
)

DEPLOYMENT_LABEL: Final = "rose.dev/deployment"
# Key of all hosts together among the counters of a node's hosts. No host has this name.
ALL_HOSTS: Final = ""
# Policy of a scheduler that was started with a mode, and of `rose harvest active`.
CLI: Final = "cli"
SCRAPED: Final = (
    "its host is watched through /metrics alone, seconds late: start the host with the plugin"
)
# All policies fit one reply.
MAX_POLICIES: Final = 128
JUDGE_S: Final = 1.0
# Nodes attach within this time after a start; before that a share of all of them means little.
SETTLE_S: Final = 10.0
# Burn rates cover minutes and hours, and cost a walk over slices for each host.
JUDGE_BUDGETS_S: Final = 5.0


def cli_policy() -> CapacityPolicy:
    """Return the policy `cli`, which allows all lending: the operator's mode alone decides."""
    return CapacityPolicy.model_validate(
        {
            "name": CLI,
            "mode": "Active",
            "maxHostBusy": None,
            "sloBudget": None,
            # A node's own time for a reclaim holds.
            "reclaimDeadline": "10m",
        }
    )


class LimitKind(StrEnum):
    """Kind of a limit on a node's lending, for counts by metrics and conditions."""

    NO_POLICY = "no_policy"
    OFF = "off"
    ADVISORY = "advisory"
    SCRAPED = "scraped"
    CANARY_HALTED = "canary_halted"
    CANARY = "canary"
    CAP = "cap"
    BLACKOUT = "blackout"
    SLO_BUDGET = "slo_budget"
    BUSY = "busy"
    STOP_POLICY = "stop_policy"
    API_SERVER = "api_server"
    OBJECT = "object"
    OLD_NODE = "old_node"
    SETTLING = "settling"


@dataclass(frozen=True, slots=True)
class Limit:
    """Reason why a node lends no more: its kind, and a sentence for people."""

    kind: LimitKind
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Attached node: its name, its labels, by which policies select it, and if it obeys caps.

    unlabelled: why its labels are not known; without them it lends nothing.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    takes_caps: bool = True
    unlabelled: str = ""


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    """Verdict of the policies on one node now, before the operator's stop.

    mode: the mode in force, sent to the node. would: the mode that mode Active would give. limits:
    reasons why the node lends no more. settled: False while the node may only seem beyond a cap on
    the number of nodes, since others have not attached yet; until then it keeps its loan, and is
    sent nothing.
    """

    node: str
    mode: HarvestMode
    would: HarvestMode
    policy: EffectivePolicy
    limits: tuple[Limit, ...] = ()
    settled: bool = True

    @property
    def told(self) -> tuple[HarvestMode, HarvestMode, bool]:
        """Modes, and True if a policy matches: a change of these is logged."""
        return self.mode, self.would, bool(self.policy.policies)

    @property
    def advises(self) -> bool:
        """True if the node only reports what it would lend."""
        return self.policy.mode is PolicyMode.ADVISORY or self.mode is not self.would


@dataclass(frozen=True, slots=True)
class CapacityNote:
    """Log record of a changed verdict, hold or canary."""

    event: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Halt:
    """Action: store that a policy's canary is halted, until the policy is applied again."""

    policy: str
    why: str


NOTHING: Final = NodeVerdict(
    "", HarvestMode.OFF, HarvestMode.OFF, EffectivePolicy(decided_by={"mode": NO_POLICY})
)


class CapacityGate:
    """Capacity policies in force, and their verdict on each node: may it lend now, and why not.

    No clock: monotonic and wall time are passed in.
    """

    def __init__(
        self,
        stop: HarvestModes,
        policies: Iterable[CapacityPolicy] = (),
        halted: Mapping[str, str] | None = None,
    ) -> None:
        """Begin with stored policies and the operator's stop.

        halted: the reasons of halted canaries, by policy name.
        """
        self.stop = stop
        self._policies = {policy.name: policy for policy in policies}
        self._halted = dict(halted or {})
        self._budgets, self._busy = BudgetHold(), BusyHold()
        self._scraped: set[str] = set()
        self._withheld: dict[str, Limit] = {}
        self._held: dict[str, Limit] = {}
        self._dark: dict[str, list[str]] = {}
        self._counting: tuple[CapacityPolicy, ...] = ()
        # Bounds on guests, by job; of all jobs together by None.
        self._most_guests: dict[str | None, list[tuple[CapacityPolicy, int]]] = {}
        self._counted: dict[str, dict[str, tuple[int, int]]] = {}
        self._labels: dict[str, dict[str, str]] = {}
        self._effective: dict[str, EffectivePolicy] = {}
        self._verdicts: dict[str, NodeVerdict] = {}
        self._admitted: dict[str, set[str]] = {}
        self._judged_s = self._budgeted_s = -math.inf
        self._began_s: float | None = None
        self._wall_s: float | None = None
        self._changed = True
        self.judgements = 0
        self._look_at_the_clock()

    # ---- policies ----

    @property
    def wall_s(self) -> float | None:
        """Wall time that was last passed in, in Unix seconds; None if unknown."""
        return self._wall_s

    @property
    def policies(self) -> tuple[CapacityPolicy, ...]:
        """All policies in force, in the order of their names."""
        return tuple(self._policies[name] for name in sorted(self._policies))

    def policy(self, name: str) -> CapacityPolicy:
        """Return the policy of that name. Raises KeyError without one."""
        return self._policies[name]

    def halted(self, policy: str) -> str | None:
        """Return the reason why a policy's canary is halted, None while it is not."""
        return self._halted.get(policy)

    def check_room(self, name: str) -> None:
        """Raise PolicyError if a policy of that name would be one more than 128."""
        if name not in self._policies and len(self._policies) >= MAX_POLICIES:
            raise PolicyError(f"{MAX_POLICIES} policies are in force; delete one first")

    def apply(self, policy: CapacityPolicy) -> bool:
        """Put a policy in force, or replace it, and end its canary's halt.

        Returns True if that changed anything. Raises PolicyError as `check_room` does.
        """
        self.check_room(policy.name)
        same = self._policies.get(policy.name) == policy and policy.name not in self._halted
        self._policies[policy.name] = policy
        self._halted.pop(policy.name, None)
        self._forget()
        return not same

    def delete(self, name: str) -> bool:
        """Take a policy out of force; return True if it was in force."""
        self._halted.pop(name, None)
        found = self._policies.pop(name, None)
        self._forget()
        return found is not None

    def withhold(self, policies: Mapping[str, Limit]) -> None:
        """Hold the nodes of these policies for the given reasons; end other holds of this kind."""
        if policies != self._withheld:
            self._withheld = dict(policies)
            self._changed = True

    # ---- what is heard ----

    def heard(
        self,
        node: str,
        busy: float | None,
        good: int,
        bad: int,
        now_s: float,
        *,
        lends: bool,
        hosts: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Record a node's telemetry: its host's busy share, and its counts of requests.

        good, bad: totals of requests within and beyond their targets, which only grow. hosts: the
        same of each of several hosts, by name. lends: True if a guest of the node is leased.
        """
        if busy is not None:
            self._busy.seen(node, busy, now_s)
        before = self._counted.get(node, {})
        now = self._counted[node] = {ALL_HOSTS: (good, bad), **hosts}
        since = {name: _since(before.get(name), counts) for name, counts in now.items()}
        good, bad = since.pop(ALL_HOSTS)
        self._budgets.serve(node, good, bad, now_s, lends=lends, hosts=since)

    def watched(self, node: str, *, scraped: bool) -> None:
        """Record how a node knows its host; with /metrics alone (scraped) it may only advise."""
        if scraped != (node in self._scraped):
            (self._scraped.add if scraped else self._scraped.discard)(node)
            self._changed = True

    def forget(self, node: str) -> None:
        """Delete a lost node's state, except for an SLO budget that holds it."""
        self._budgets.forget(node)
        self._busy.forget(node)
        self._scraped.discard(node)
        for known in (self._counted, self._labels, self._effective, self._verdicts):
            known.pop(node, None)
        self._changed = True

    # ---- verdicts ----

    def judge(
        self, nodes: Callable[[], Iterable[NodeFacts]], now_s: float, wall_s: float | None = None
    ) -> list[CapacityNote | Halt]:
        """Judge all nodes if a second passed or something changed; return log records and halts.

        nodes: returns the attached nodes. wall_s: Unix seconds for blackout windows; while it was
        never known every window counts.
        """
        if wall_s is not None:
            self._changed |= self._wall_s is None
            self._wall_s = wall_s
        if not self._changed and now_s < self._judged_s + JUDGE_S:
            return []
        self._judged_s, self._changed = now_s, False
        self._begin(now_s)
        self._look_at_the_clock()
        self.judgements += 1
        facts = sorted(nodes(), key=lambda each: each.name)
        for each in facts:
            if self._labels.get(each.name) != each.labels or each.name not in self._effective:
                self._labels[each.name] = dict(each.labels)
                self._effective[each.name] = effective(self._counting, each.name, each.labels)
        acts = self._judge_holds(facts, now_s)
        return acts + self._judge_nodes(facts, now_s)

    def greet(self, node: NodeFacts, now_s: float) -> list[CapacityNote | Halt]:
        """Judge one node that just attached; return log records.

        If a cap counts nodes, its verdict is settled only by the next `judge`, which sees them all.
        """
        self._begin(now_s)
        self._changed = True
        self._labels[node.name] = dict(node.labels)
        self._effective[node.name] = effective(self._counting, node.name, node.labels)
        settling = Limit(LimitKind.SETTLING, "other nodes are not counted yet")
        counted = (settling,) if self._is_counted(node.name) else ()
        verdict = self._judged(node, counted, settled=not (counted or node.unlabelled))
        self._verdicts[node.name] = verdict
        return self._said(verdict) if verdict.settled else []

    def trial(self, policy: CapacityPolicy, nodes: Iterable[NodeFacts]) -> "CapacityGate":
        """Return a gate to ask what would hold if a policy were applied now; this one is as it was.

        It shares what was heard with this one: nothing may be told to it.
        """
        trial = copy.copy(self)
        trial._policies = {**self._policies, policy.name: policy}
        trial._halted = {name: why for name, why in self._halted.items() if name != policy.name}
        trial._effective = {}
        trial._look_at_the_clock()
        facts = list(nodes)
        for each in facts:
            trial._effective[each.name] = effective(trial._counting, each.name, each.labels)
        beyond = trial._admit(facts)
        trial._verdicts = {
            each.name: trial._judged(each, beyond.get(each.name, ()), settled=True)
            for each in facts
        }
        return trial

    def changed(self) -> None:
        """Record a change that verdicts depend on, so that the next `judge` judges at once."""
        self._changed = True

    def verdict(self, node: str) -> NodeVerdict:
        """Return the node's newest verdict; an unknown node's verdict lends nothing."""
        return self._verdicts.get(node, NOTHING)

    def verdicts(self) -> tuple[NodeVerdict, ...]:
        """Return the newest verdicts of all nodes, by node name."""
        return tuple(self._verdicts[name] for name in sorted(self._verdicts))

    def mode_of(self, replica: str, node: str) -> HarvestMode:
        """Return a guest's mode: the stricter of the operator's stop and its node's verdict."""
        return stricter(self.stop.mode_of(replica), self.verdict(node).mode)

    @property
    def budgets(self) -> BudgetHold:
        """SLO budgets of nodes and deployments."""
        return self._budgets

    def busy_share(self, node: str) -> float | None:
        """Return the last reported busy share of the node's host, None if unknown."""
        return self._busy.share(node)

    # ---- leases ----

    def plan(self, offers: Iterable[Offer], leases: Iterable[Lease]) -> HarvestPlan:
        """Return offers that may be leased, leases to renew, and leases to release.

        leases: oldest first, since the newest guests are the ones beyond a policy's number. An
        unhealthy replica gets no new lease but keeps the one it has: it gets no turns either way,
        and it may be catching up.
        """
        offered = {offer.replica: offer for offer in offers}
        held = {lease.replica: lease for lease in leases}
        renew: list[Lease] = []
        release: list[Lease] = []
        for lease in held.values():
            if lease.state is LeaseState.ACTIVE and lease.replica in offered:
                offer = offered[lease.replica]
                keeps = self._allows(offer, HarvestMode.ACTIVE, HarvestMode.HOLD)
                (renew if keeps else release).append(lease)
        guests = [each for each in renew if offered[each.replica].kind is ReplicaKind.GUEST]
        beyond = self._beyond([(each.job, offered[each.replica].node) for each in guests])
        ending = {guests[at].replica for at in beyond}
        return HarvestPlan(
            lease=tuple(
                offer
                for offer in offered.values()
                if offer.replica not in held and self.may_lease(offer)
            ),
            renew=tuple(each for each in renew if each.replica not in ending),
            release=tuple(release),
            beyond=tuple(guests[at] for at in beyond),
        )

    def may_lease(self, offer: Offer) -> bool:
        """Return True if a replica may get a lease: it is healthy and its mode allows it."""
        return offer.healthy and self._allows(offer, HarvestMode.ACTIVE)

    def cooldown_s(self, node: str) -> float:
        """Return the least seconds from a revocation to the next lease on a node, by policies."""
        return self.verdict(node).policy.cooldown_s

    def weight_of(self, job: str) -> float:
        """Return a job's priority: the least that any policy sets for it, 1 by default."""
        said = [t.priority for p in self._counting for t in p.tenants if t.job == job]
        return min(said, default=1.0)

    def admits(self, job: str, offer: Offer, held: Iterable[tuple[str, str]]) -> bool:
        """Return True if the policies' quotas allow the job this guest too.

        held: (job, node) of each leased guest. Dedicated replicas are always allowed.
        """
        wanted = (job, offer.node)
        return offer.kind is ReplicaKind.DEDICATED or not self._beyond([wanted], held)

    def _beyond(
        self, guests: Sequence[tuple[str, str]], held: Iterable[tuple[str, str]] = ()
    ) -> list[int]:
        """Return the places of guests, (job, node) each, that the policies' numbers do not allow
        beside `held` and those before them.
        """
        if not self._most_guests:
            return []

        def bounds(job: str, node: str) -> dict[tuple[str, str | None], int]:
            return {
                (policy.name, whose): most
                for whose in (None, job)
                for policy, most in self._most_guests.get(whose, ())
                if self._matches(policy, node)
            }

        counts = Counter(key for guest in held for key in bounds(*guest))
        beyond: list[int] = []
        for at, guest in enumerate(guests):
            most = bounds(*guest)
            if any(counts[key] >= most[key] for key in most):
                beyond.append(at)
            else:
                counts.update(list(most))
        return beyond

    def _allows(self, offer: Offer, *modes: HarvestMode) -> bool:
        dedicated = offer.kind is ReplicaKind.DEDICATED
        return dedicated or self.mode_of(offer.replica, offer.node) in modes

    def _matches(self, policy: CapacityPolicy, node: str) -> bool:
        return policy.node_selector.matches(node, self._labels.get(node, {}))

    def _forget(self) -> None:
        self._look_at_the_clock()
        self._effective.clear()
        self._changed = True

    # ---- how verdicts come about ----

    def _judge_holds(self, facts: list[NodeFacts], now_s: float) -> list[CapacityNote | Halt]:
        busy_limits = {each.name: self._effective[each.name].max_host_busy for each in facts}
        changes = self._busy.judge(busy_limits, now_s)
        if now_s >= self._budgeted_s + JUDGE_BUDGETS_S:
            self._budgeted_s = now_s
            budgets = {each.name: self._effective[each.name].slo_budget for each in facts}
            deployments = {
                each.name: each.labels[DEPLOYMENT_LABEL]
                for each in facts
                if each.labels.get(DEPLOYMENT_LABEL)
            }
            burns = self._budgets.judge(budgets, now_s, deployments)
            acts = [act for each in burns for act in self._halts(each)]
            return [*map(_noted, [*changes, *burns]), *acts]
        return [*map(_noted, changes)]

    def _halts(self, change: HoldChange) -> list[CapacityNote | Halt]:
        """Halt partial canaries that a burning host was part of; return halts and log records."""
        if not change.begins or change.deployment is not None:
            return []
        acts: list[CapacityNote | Halt] = []
        for name in self._effective[change.node].policies:
            percent = self._policies[name].canary.percent
            if percent < 100 and name not in self._halted and in_canary(change.node, percent):
                self._halted[name] = why = f"{change.node}: {change.why}"
                self._changed = True
                acts += [
                    Halt(name, why),
                    CapacityNote("canary_halted", {"policy": name, "why": why}),
                ]
        return acts

    def _begin(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = now_s

    def _look_at_the_clock(self) -> None:
        """Record which policies count now and which windows hold, once for all nodes.

        While the time is unknown every policy counts, and none with a time or a window lends.
        """
        wall_s = self._wall_s
        counting = tuple(each for each in self.policies if wall_s is None or each.counts_at(wall_s))
        if counting != self._counting:
            self._counting = counting
            self._most_guests = _most_guests(counting)
            self._effective.clear()
        self._dark = {policy.name: list(_dark(policy, wall_s)) for policy in counting}

    def _is_counted(self, node: str) -> bool:
        policy = self._effective[node]
        return policy.deployment_share is not None or bool(policy.node_caps)

    def _judged(self, node: NodeFacts, beyond: tuple[Limit, ...], *, settled: bool) -> NodeVerdict:
        whys = beyond
        if node.unlabelled:
            whys += (Limit(LimitKind.API_SERVER, node.unlabelled),)
        if self._effective[node.name].has_caps and not node.takes_caps:
            why = "its node keeps within no caps; upgrade it"
            whys += (Limit(LimitKind.OLD_NODE, why),)
            settled = True
        verdict = self._verdict(node.name, whys, self._held.get(node.name))
        known = not node.unlabelled
        if settled or (known and (verdict.advises or verdict.policy.mode is PolicyMode.OFF)):
            return verdict
        return replace(verdict, mode=HarvestMode.HOLD, would=HarvestMode.HOLD, settled=False)

    def _judge_nodes(self, facts: list[NodeFacts], now_s: float) -> list[CapacityNote | Halt]:
        beyond = self._admit(facts)
        busy, burning = self._busy.status(), self._budgets.status()
        self._held = {node: Limit(LimitKind.BUSY, why) for node, why in busy.items()}
        self._held |= {node: Limit(LimitKind.SLO_BUDGET, why) for node, why in burning.items()}
        settled = self._began_s is not None and now_s >= self._began_s + SETTLE_S
        acts: list[CapacityNote | Halt] = []
        verdicts = {}
        for each in facts:
            whys = beyond.get(each.name, ())
            verdict = self._judged(each, whys, settled=settled or not (whys or each.unlabelled))
            verdicts[each.name] = verdict
            before = self._verdicts.get(each.name)
            if before is None or before.told != verdict.told:
                acts += self._said(verdict)
        self._verdicts = verdicts
        return acts

    def _said(self, verdict: NodeVerdict) -> list[CapacityNote | Halt]:
        # Without an operator's policy there is nothing to explain.
        if set(self._policies) <= {CLI}:
            return []
        why = "; ".join(map(str, verdict.limits))
        fields = {"node": verdict.node, "mode": verdict.mode.value, "why": why}
        if verdict.advises:
            return [CapacityNote("capacity_advice", {**fields, "would": verdict.would.value})]
        return [CapacityNote("capacity", fields)]

    def _verdict(self, node: str, beyond: tuple[Limit, ...], held: Limit | None) -> NodeVerdict:
        policy = self._effective[node]
        if policy.mode is PolicyMode.OFF:
            limit = Limit(LimitKind.OFF, f"mode Off ({policy.decided_by['mode']})")
            return NodeVerdict(node, HarvestMode.OFF, HarvestMode.OFF, policy, (limit, *beyond))
        would, limits = self._would(policy, beyond, held)
        advises = self._only_advises(node, policy)
        if advises:
            return NodeVerdict(node, HarvestMode.OFF, would, policy, (advises, *limits))
        return NodeVerdict(node, would, would, policy, limits)

    def _only_advises(self, node: str, policy: EffectivePolicy) -> Limit | None:
        if policy.mode is PolicyMode.ADVISORY:
            whose = policy.decided_by["mode"]
            if whose == NO_POLICY:
                return Limit(LimitKind.NO_POLICY, whose)
            return Limit(LimitKind.ADVISORY, f"mode Advisory ({whose})")
        if node in self._scraped:
            return Limit(LimitKind.SCRAPED, SCRAPED)
        for name in policy.policies:
            if name in self._halted:
                why = f"canary halted ({name}): {self._halted[name]}"
                return Limit(LimitKind.CANARY_HALTED, why)
            percent = self._policies[name].canary.percent
            if not in_canary(node, percent):
                why = f"outside the canary of {percent:g}% ({name})"
                return Limit(LimitKind.CANARY, why)
        return None

    def _would(
        self, policy: EffectivePolicy, beyond: tuple[Limit, ...], held: Limit | None
    ) -> tuple[HarvestMode, tuple[Limit, ...]]:
        """Return the mode that an Active policy gives now, and all limits behind it."""
        found = [(HarvestMode.OFF, limit) for limit in beyond]
        for name in policy.policies:
            found += [
                (HarvestMode.HOLD_AND_DRAIN, Limit(LimitKind.BLACKOUT, why))
                for why in self._dark.get(name, ())
            ]
        if held is not None:
            found.append((HarvestMode.HOLD_AND_DRAIN, held))
        for name in policy.policies:
            if name in self._withheld:
                found.append((HarvestMode.HOLD, self._withheld[name]))
        if policy.stop_policy is not StopPolicy.NONE:
            drains = policy.stop_policy is StopPolicy.HOLD_AND_DRAIN
            mode = HarvestMode.HOLD_AND_DRAIN if drains else HarvestMode.HOLD
            whose = policy.decided_by["stopPolicy"]
            why = f"stopPolicy {policy.stop_policy.value} ({whose})"
            found.append((mode, Limit(LimitKind.STOP_POLICY, why)))
        mode = HarvestMode.ACTIVE
        for each, _ in found:
            mode = stricter(mode, each)
        return mode, tuple(limit for _, limit in found)

    def _admit(self, facts: list[NodeFacts]) -> dict[str, tuple[Limit, ...]]:
        """Return, by node, the caps on the number of nodes that leave the node out.

        Nodes admitted before come first, then others in the order of their names' hashes.
        """
        beyond: dict[str, list[Limit]] = {}

        def cap(key: str, members: list[str], most: int, why: str) -> None:
            before = self._admitted.get(key, set())
            order = sorted(members, key=lambda node: (node not in before, rank_of(node), node))
            chosen[key] = set(order[:most])
            for node in order[most:]:
                beyond.setdefault(node, []).append(Limit(LimitKind.CAP, why))

        chosen: dict[str, set[str]] = {}
        lendable = [each for each in facts if self._lendable(each.name)]
        for policy in self._counting:
            limit = policy.max_harvest.nodes
            if limit is None:
                continue
            count = sum(policy.name in self._effective[each.name].policies for each in facts)
            members = [
                each.name for each in lendable if policy.name in self._effective[each.name].policies
            ]
            most = most_of(limit, count)
            why = f"maxHarvest.nodes {limit}: {most} of {count} nodes ({policy.name})"
            cap(policy.name, members, most, why)
        totals = Counter(each.labels.get(DEPLOYMENT_LABEL, "") for each in facts)
        hosts: dict[str, list[str]] = {}
        for each in lendable:
            hosts.setdefault(each.labels.get(DEPLOYMENT_LABEL, ""), []).append(each.name)
        for name, members in hosts.items():
            total = totals[name]
            shares = [
                (share, node)
                for node in members
                if (share := self._effective[node].deployment_share) is not None
            ]
            if shares:
                share, node = min(shares)
                whose = self._effective[node].decided_by["maxHarvest.deploymentShare"]
                most = int(share * total + 1e-9)
                why = f"maxHarvest.deploymentShare {share:g}: {most} of {total} hosts ({whose})"
                cap(f"deployment/{name}", members, most, why)
        self._admitted = chosen
        return {node: tuple(whys) for node, whys in beyond.items()}

    def _lendable(self, node: str) -> bool:
        """Return True if a node counts against a cap on nodes, because it may lend."""
        policy = self._effective[node]
        if policy.mode is PolicyMode.OFF:
            return False
        # An advising node is counted with the acting ones if all only advise.
        return policy.mode is PolicyMode.ADVISORY or self._only_advises(node, policy) is None


def _most_guests(
    policies: Iterable[CapacityPolicy],
) -> dict[str | None, list[tuple[CapacityPolicy, int]]]:
    bounds = defaultdict[str | None, list[tuple[CapacityPolicy, int]]](list)
    for policy in policies:
        of_tenants = [(each.job, each.max_guests) for each in policy.tenants]
        for job, most in [(None, policy.max_harvest.guests), *of_tenants]:
            if most is not None:
                bounds[job].append((policy, most))
    return dict(bounds)


def _dark(policy: CapacityPolicy, wall_s: float | None) -> Iterator[str]:
    """Yield the reasons why nothing is lent at a time by this policy's windows."""
    for window in policy.blackout_windows:
        if wall_s is None or window.holds_at(wall_s):
            yield f"blackout {window} ({policy.name})"
    allowed = policy.allowed_windows
    if wall_s is None and (allowed or policy.is_timed):
        yield f"the time is not known yet ({policy.name})"
    elif allowed and not any(window.holds_at(wall_s or 0.0) for window in allowed):
        yield f"outside allowedWindows {'; '.join(map(str, allowed))} ({policy.name})"


def _noted(change: HoldChange) -> CapacityNote:
    whose = (
        {"node": change.node} if change.deployment is None else {"deployment": change.deployment}
    )
    return CapacityNote(
        "capacity_held" if change.begins else "capacity_freed", {**whose, "why": change.why}
    )


def _since(before: tuple[int, int] | None, now: tuple[int, int]) -> tuple[int, int]:
    """Return the (good, bad) counts since `before`; counters that fell count from 0.

    The first counters are of unknown times, so they count for nothing.
    """
    if before is None:
        return 0, 0
    if now[0] < before[0] or now[1] < before[1]:
        return now
    return now[0] - before[0], now[1] - before[1]

"""Holds of hosts whose SLO budget burns while they lend, and of hosts that are too busy.

    requests, lending ──> BudgetHold ──> a node is held ──> several of one deployment: all of it is
                          (all hosts of a node together, and each by itself)
    busy share        ──> BusyHold   ──> a node is held

Burn rates are those of the SRE workbook (`slo.error_budget`): its two paging rules begin a hold, so
a slow leak that only wants a ticket does not. A hold ends by hysteresis. Lending that makes hosts
slow shows in several of a deployment at once, since a router evens their load out; one slow host
shows alone.

Both are state machines without a clock: they take reports, `judge` returns the holds that begin
and end, and `status` has those that last.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeAlias

from elastic_scheduler.capacity.policy import MaxHostBusy, SloBudget
from slo import ErrorBudget
from slo.error_budget import PAGING, PERIOD_S, CountRing, burnt

LONGEST_S: Final = max(rule.long_s for rule in PAGING)
# Default until a policy sets another one.
OBJECTIVE: Final = 0.99
# Hosts of one node, including those of the last six hours: names are as many as its hosts' pods.
MOST_HOSTS: Final = 64
# Below it the budget lasts for the whole period.
CALM_BURN: Final = 1.0
CALM_WINDOW_S: Final = 300.0
# A host that stopped lending this long ago burns its budget by itself.
LENT_LATELY_S: Final = 300.0
LEAST_OF_DEPLOYMENT: Final = 2
SHARE_OF_DEPLOYMENT: Final = 0.25
SLICE_S: Final = PERIOD_S / 120
# Deployments whose requests are kept over the period; 3 kB each in the store.
MOST_DEPLOYMENTS: Final = 256
# A node reports twice a second, for at most ten minutes of average.
_MOST_SAMPLES: Final = 2_400


@dataclass(frozen=True, slots=True)
class HoldChange:
    """Begin or end of a hold of a node, or of all nodes of `deployment`; why: its figures."""

    begins: bool
    node: str
    why: str
    deployment: str | None = None


@dataclass(frozen=True, slots=True)
class BudgetLeft:
    """Remaining share of a deployment's SLO budget: 1 without requests, below 0 when overspent.

    requests: number of them that say so, over the last `history_s` seconds, 30 days at most.
    """

    share: float
    requests: int
    history_s: float


BudgetSlices: TypeAlias = tuple[tuple[float, int, int], ...]
"""Requests of a deployment within and beyond their targets, by times in Unix seconds."""


@dataclass(slots=True)
class _Deployment:
    """Requests of all hosts of a deployment in the period, the first of them at `since_s`."""

    since_s: float
    counts: CountRing = field(default_factory=lambda: CountRing(SLICE_S, 121))


@dataclass(slots=True)
class _OneHost:
    """One of several hosts of a node, with its SLO budget."""

    budget: ErrorBudget
    seen_s: float
    missed_s: float = -math.inf


@dataclass(slots=True)
class _Host:
    """SLO budgets of a node: of all its hosts together, and of each of several."""

    budget: ErrorBudget
    hosts: dict[str, _OneHost] = field(default_factory=dict)
    lent_s: float = -math.inf
    held: str | None = None
    calm_since_s: float | None = None


class BudgetHold:
    """Holds of nodes whose hosts burn their SLO budget, and of deployments with several."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._deployments: dict[str, str] = {}
        self._of: dict[str, str] = {}
        self._counts: dict[str, _Deployment] = {}
        # Unix time less `now_s`, once a process restores counts.
        self._epoch_s = 0.0

    def serve(
        self,
        node: str,
        good: int,
        bad: int,
        now_s: float,
        *,
        lends: bool,
        hosts: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Add a node's requests since its last report, within (good) and beyond (bad) their
        targets.

        lends: a guest of the node is leased. hosts: (good, bad) of each of several hosts by name,
        whose sums are `good` and `bad`: one burning host among seven would not show in a sum.
        """
        host = self._hosts.get(node)
        if host is None:
            host = self._hosts[node] = _Host(ErrorBudget(OBJECTIVE))
        if good or bad:
            host.budget.add(now_s, good, bad)
            self._count(self._of.get(node, ""), now_s + self._epoch_s, good, bad)
        if hosts or host.hosts:
            _serve_each(host, hosts, now_s)
        if lends:
            host.lent_s = now_s

    def forget(self, node: str) -> None:
        """Delete the SLO budget of a lost node, unless the node is held."""
        host = self._hosts.get(node)
        if host is not None and host.held is None:
            del self._hosts[node]

    def status(self) -> dict[str, str]:
        """Return, by node, why each held node is held: its own burn rate, or a deployment's."""
        own = {node: host.held for node, host in self._hosts.items() if host.held is not None}
        by_deployment = {
            node: self._deployments[name]
            for node, name in self._of.items()
            if name in self._deployments
        }
        return by_deployment | own

    def left(self, now_s: float) -> dict[str, BudgetLeft]:
        """Return what is left of the SLO budget by deployment, over all its hosts; "" for hosts
        without one.
        """
        objectives: dict[str, float] = {}
        for node, host in self._hosts.items():
            name = self._of.get(node, "")
            objectives[name] = max(objectives.get(name, 0.0), host.budget.objective)
        found, at_s = {}, now_s + self._epoch_s
        for name, objective in objectives.items():
            known = self._counts.get(name) or _Deployment(at_s)
            good, bad = known.counts.counts(at_s, PERIOD_S)
            history_s = min(PERIOD_S, at_s - known.since_s)
            found[name] = BudgetLeft(1.0 - burnt(good, bad, objective), good + bad, history_s)
        return found

    def saved(self, now_s: float) -> dict[str, BudgetSlices]:
        """Return the period's requests by deployment, for a later process to restore."""
        found = {
            name: tuple(
                (max(at_s, known.since_s), good, bad)
                for at_s, good, bad in known.counts.slices(now_s + self._epoch_s)
            )
            for name, known in self._counts.items()
        }
        self._counts = {name: each for name, each in self._counts.items() if found[name]}
        return {name: slices for name, slices in found.items() if slices}

    def restore(self, saved: Mapping[str, BudgetSlices], now_s: float, wall_s: float) -> None:
        """Add an earlier process's requests, without those of the future; wall_s: Unix seconds.

        Slices are the same in every process from here on. Call it before any report.
        """
        self._epoch_s = wall_s - now_s
        for name, slices in saved.items():
            for at_s, good, bad in slices:
                if at_s <= wall_s:
                    self._count(name, at_s, good, bad)

    def _count(self, name: str, at_s: float, good: int, bad: int) -> None:
        known = self._counts.get(name)
        if known is None and len(self._counts) < MOST_DEPLOYMENTS:
            known = self._counts[name] = _Deployment(at_s)
        if known is not None:
            known.since_s = min(known.since_s, at_s)
            known.counts.add(at_s, good, bad)

    def judge(
        self,
        limits: Mapping[str, SloBudget | None],
        now_s: float,
        deployments: Mapping[str, str] = MappingProxyType({}),
    ) -> list[HoldChange]:
        """Begin and end holds; return the changes.

        limits: SLO budget by node, None without one. deployments: deployment by node.
        """
        acts: list[HoldChange] = []
        self._of = dict(deployments)
        for node, host in self._hosts.items():
            limit = limits.get(node)
            if limit is None:
                if node in limits and host.held is not None:
                    host.held = host.calm_since_s = None
                    why = "no policy bounds its SLO budget any more"
                    acts.append(HoldChange(False, node, why))
                continue
            for budget in (host.budget, *(each.budget for each in host.hosts.values())):
                budget.objective = limit.objective
            if host.held is None:
                burns = self._burns(host, limit, now_s)
                if burns is not None:
                    host.held, host.calm_since_s = burns, None
                    acts.append(HoldChange(True, node, burns))
            elif self._calm(host, limit, now_s):
                host.held = host.calm_since_s = None
                why = f"its burn rate was at most {CALM_BURN:g} for {limit.release_after_s:g} s"
                acts.append(HoldChange(False, node, why))
        return acts + self._judge_deployments(deployments)

    def _burns(self, host: _Host, limit: SloBudget, now_s: float) -> str | None:
        if now_s > host.lent_s + LENT_LATELY_S:
            return None
        why = _burnt(host.budget, limit, now_s, "")
        for name, each in host.hosts.items():
            # Without a miss in the longest window no rule can fire.
            if why is None and now_s <= each.missed_s + LONGEST_S:
                why = _burnt(each.budget, limit, now_s, f" of host {name}")
        return why

    def _calm(self, host: _Host, limit: SloBudget, now_s: float) -> bool:
        budgets = (host.budget, *(each.budget for each in host.hosts.values()))
        if any(budget.burn_rate(now_s, CALM_WINDOW_S) > CALM_BURN for budget in budgets):
            host.calm_since_s = None
            return False
        if host.calm_since_s is None:
            host.calm_since_s = now_s
        return now_s >= host.calm_since_s + limit.release_after_s

    def _judge_deployments(self, deployments: Mapping[str, str]) -> list[HoldChange]:
        members: dict[str, list[str]] = {}
        for node, name in deployments.items():
            members.setdefault(name, []).append(node)
        acts: list[HoldChange] = []
        for name, nodes in members.items():
            burning = [n for n in nodes if n in self._hosts and self._hosts[n].held is not None]
            most = max(LEAST_OF_DEPLOYMENT, math.ceil(SHARE_OF_DEPLOYMENT * len(nodes)))
            if name not in self._deployments and len(burning) >= most:
                why = (
                    f"SLO budget: {len(burning)} of {len(nodes)} hosts of deployment"
                    f" {name or '(none)'} burn theirs, {most} hold all"
                )
                self._deployments[name] = why
                acts.append(HoldChange(True, "", why, name))
            elif name in self._deployments and not burning:
                del self._deployments[name]
                why = "no host of it burns its budget any more"
                acts.append(HoldChange(False, "", why, name))
        for name in [n for n in self._deployments if n not in members]:
            del self._deployments[name]
        return acts


def _serve_each(node: _Host, hosts: Mapping[str, tuple[int, int]], now_s: float) -> None:
    """Add each host's requests to its own budget; drop hosts silent for the longest window."""
    for name, (good, bad) in hosts.items():
        one = node.hosts.get(name)
        if one is None:
            if len(node.hosts) >= MOST_HOSTS:
                del node.hosts[min(node.hosts, key=lambda each: node.hosts[each].seen_s)]
            budget = ErrorBudget(node.budget.objective)
            one = node.hosts[name] = _OneHost(budget, now_s)
        one.seen_s = now_s
        if good or bad:
            one.budget.add(now_s, good, bad)
        if bad:
            one.missed_s = now_s
    for name in [n for n, one in node.hosts.items() if now_s > one.seen_s + LONGEST_S]:
        del node.hosts[name]


def _burnt(budget: ErrorBudget, limit: SloBudget, now_s: float, whose: str) -> str | None:
    """Return the reason if a paging burn-rate rule fires for the budget, None if none does."""
    for alert in budget.alerts(now_s):
        good, bad = budget.counts(now_s, alert.rule.long_s)
        if bad >= limit.min_bad:
            threshold = alert.rule.threshold(PERIOD_S)
            return (
                f"SLO budget{whose}: {bad} of {good + bad} requests missed their targets in"
                f" {alert.rule.long_s / 60:.0f} min; burn rate {alert.long_burn:.1f} there and"
                f" {alert.short_burn:.1f} in {alert.rule.short_s / 60:.0f} min, at most"
                f" {threshold:.1f} while it lends"
            )
    return None


@dataclass(slots=True)
class _HostLoad:
    samples: deque[tuple[float, float]]
    since_s: float
    held: str | None = None


class BusyHold:
    """Holds of nodes whose hosts are too busy to lend."""

    def __init__(self) -> None:
        self._loads: dict[str, _HostLoad] = {}

    def seen(self, node: str, share: float, now_s: float) -> None:
        """Add the share of the time since the last report in which a node's host was busy."""
        load = self._loads.get(node)
        if load is None:
            load = self._loads[node] = _HostLoad(deque(maxlen=_MOST_SAMPLES), now_s)
        load.samples.append((now_s, min(1.0, max(0.0, share))))

    def forget(self, node: str) -> None:
        """Delete the busy shares of a lost node."""
        self._loads.pop(node, None)

    def status(self) -> dict[str, str]:
        """Return the reason why each held node's host is too busy, by node name."""
        return {node: load.held for node, load in self._loads.items() if load.held is not None}

    def share(self, node: str) -> float | None:
        """Return the newest busy share of a node's host; None before its first report."""
        load = self._loads.get(node)
        return load.samples[-1][1] if load is not None and load.samples else None

    def judge(self, limits: Mapping[str, MaxHostBusy | None], now_s: float) -> list[HoldChange]:
        """Begin and end holds; return the changes. limits: bounds by node, None without one."""
        acts: list[HoldChange] = []
        for node, load in self._loads.items():
            limit = limits.get(node)
            if limit is None:
                if load.held is not None and node in limits:
                    load.held = None
                    why = "no policy bounds how busy its host may be any more"
                    acts.append(HoldChange(False, node, why))
                continue
            mean = self._mean(load, limit.over_s, now_s)
            if mean is None:
                continue
            if load.held is None and mean >= limit.share:
                load.held = (
                    f"busy: its host worked {mean:.0%} of the last {limit.over_s:g} s, at most"
                    f" {limit.share:.0%} while it lends"
                )
                acts.append(HoldChange(True, node, load.held))
            elif load.held is not None and mean < limit.resume:
                load.held = None
                why = (
                    f"its host worked {mean:.0%} of the last {limit.over_s:g} s, below"
                    f" {limit.resume:.0%}"
                )
                acts.append(HoldChange(False, node, why))
        return acts

    def _mean(self, load: _HostLoad, over_s: float, now_s: float) -> float | None:
        """Return the busy share averaged over the last `over_s`; None while too little is known."""
        if now_s < load.since_s + over_s:
            return None
        since_s = now_s - over_s
        weighted = weight = 0.0
        # Minutes of samples are kept, for the longest window; only the newest are in this one, with
        # one before it. A sample covers the time since the one before it.
        recent: list[tuple[float, float]] = []
        for sample in reversed(load.samples):
            recent.append(sample)
            if sample[0] <= since_s:
                break
        before_s: float | None = None
        for at_s, share in reversed(recent):
            if before_s is not None and at_s > since_s:
                span_s = at_s - max(before_s, since_s)
                weighted += share * span_s
                weight += span_s
            before_s = at_s
        return weighted / weight if weight > over_s / 2 else None

"""Figures of a leading scheduler, as `/metrics` shows them: counted, never one row a lease.

A snapshot of a thousand nodes takes too long to be made at each scrape; of this all sums are made
in one walk. Everything here is bounded: by the nodes that may attach, the jobs that may register.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import Advice
from rose.scheduler.core.capacity import Capacity
from rose.scheduler.core.demand import DemandBook, JobFigures
from rose.scheduler.core.fleet import Fleet
from rose.scheduler.core.job_registry import JobRegistry
from rose.scheduler.core.leasing import Leasing
from rose.scheduler.core.usage import Lent, Pair, UsageBook

# How a verdict's limit begins, and the name of its kind: what follows is for people.
LIMIT_KINDS = (
    ("no policy matches", "no_policy"),
    ("mode Off", "off"),
    ("mode Advisory", "advisory"),
    ("its host is watched through", "scraped"),
    ("canary halted", "canary_halted"),
    ("outside the canary", "canary"),
    ("maxHarvest.", "cap"),
    ("blackout", "blackout"),
    ("SLO budget", "slo_budget"),
    ("busy", "busy"),
    ("stopPolicy", "stop_policy"),
    ("the API server", "api_server"),
    ("the object cannot", "object"),
    ("its node keeps within no caps", "old_node"),
    ("other nodes are not counted", "settling"),
)
OTHER_KIND = "other"


def kind_of(limit: str) -> str:
    """The kind of a limit: one of a few, where its words are as many as there are nodes."""
    return next((kind for begins, kind in LIMIT_KINDS if limit.startswith(begins)), OTHER_KIND)


@dataclass(frozen=True, slots=True)
class SchedulerFigures:
    """Counts of one moment. leases: by (job, kind of replica); offers: by (kind, leased or free).

    held: nodes by the kind of what holds them back. budget_left: share of the SLO budget, by
    deployment. silent_s: since each attached node said anything. stop: mode that the operator set.
    jobs: that are registered. usage: what was lent, by owner and job.
    """

    nodes: int = 0
    away: int = 0
    gateways: int = 0
    promised: int = 0
    leases: Mapping[tuple[str, str], int] = field(default_factory=dict)
    node_leases: Mapping[str, int] = field(default_factory=dict)
    offers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    demand: tuple[JobFigures, ...] = ()
    modes: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    advice: Mapping[str, Advice] = field(default_factory=dict)
    budget_left: Mapping[str, float] = field(default_factory=dict)
    silent_s: Mapping[str, float] = field(default_factory=dict)
    stop: HarvestMode = HarvestMode.OFF
    jobs: frozenset[str] = frozenset()
    usage: Mapping[Pair, Lent] = field(default_factory=dict)


def figures_of(
    fleet: Fleet,
    leasing: Leasing,
    jobs: JobRegistry,
    capacity: Capacity,
    demand: DemandBook,
    usage: UsageBook,
    now_s: float,
    *,
    budgets: bool = True,
) -> SchedulerFigures:
    """Count all of it; SLO budgets, which cost a walk over 30 days of each host, where asked."""
    leases: Counter[tuple[str, str]] = Counter()
    offers: Counter[tuple[str, str]] = Counter()
    views = fleet.nodes
    node_leases = {view.node: 0 for view in views}
    for offer in fleet.live_offers(now_s).values():
        job = leasing.leased_to(offer.replica)
        offers[offer.kind.value, "leased" if job else "free"] += 1
        if job:
            leases[job, offer.kind.value] += 1
            node_leases[offer.node] = node_leases.get(offer.node, 0) + 1
    alone = jobs.only is not None
    asked = (demand.figures(job.job, now_s, alone=alone) for job in jobs.live)
    verdicts = capacity.gate.verdicts()
    return SchedulerFigures(
        nodes=len(views),
        away=len(fleet.away(now_s)),
        gateways=len(demand),
        promised=leasing.promised,
        leases=leases,
        node_leases=node_leases,
        offers=offers,
        demand=tuple(each for each in asked if each is not None),
        modes=Counter(each.mode.value for each in verdicts),
        held=_kinds(each.limits for each in verdicts),
        advice={each.node: capacity.advice_of(each.node) for each in verdicts},
        budget_left=capacity.gate.budget_left(now_s) if budgets else {},
        silent_s={view.node: max(0.0, now_s - view.heard_s) for view in views},
        stop=capacity.stop.mode,
        jobs=frozenset(job.job for job in jobs.live),
        usage=usage.sums(now_s),
    )


def _kinds(limits: Iterable[Iterable[str]]) -> Counter[str]:
    """Each node once for each kind that holds it back."""
    return Counter(kind for each in limits for kind in {kind_of(limit) for limit in each})

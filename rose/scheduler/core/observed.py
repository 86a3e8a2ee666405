"""Observation of a leading scheduler: all that its dashboard shows, taken in one walk of its loop.

What is handed out never changes afterwards, so pages are made of it beside the loop. It holds no
protobuf rows of its own: a snapshot of a thousand nodes takes too long to be made each second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_scheduler import HarvestMode, Lease, Offer
from elastic_scheduler.capacity import CapacityPolicy, Lendable, NodeVerdict
from elastic_scheduler.leases.harvest_mode import stricter
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.capacity import Capacity
from rose.scheduler.core.demand import DemandBook, JobFigures
from rose.scheduler.core.fleet import Fleet, HealthBook, NodeView
from rose.scheduler.core.job_registry import JobRegistry
from rose.scheduler.core.leasing import Leasing
from rose.scheduler.core.runs import RunBook
from rose.scheduler.core.usage import Lent, Pair, UsageBook
from rose.scheduler.persistence import JobRecord


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One attached node. mode: of its verdict and the operator's stop, the stricter.

    lendable: what it lends or would, now; advised_*: sums of that over advised_s seconds.
    """

    node: str
    silent_s: float
    labels: Mapping[str, str]
    telemetry: pb.Telemetry
    offers: tuple[Offer, ...]
    verdict: NodeVerdict
    mode: HarvestMode
    lendable: Lendable = field(default_factory=Lendable)
    advised_s: float = 0.0
    advised_byte_s: float = 0.0
    advised_compute_s: float = 0.0
    busy: float | None = None


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """A lease that lives. why: the last decision about it."""

    lease: Lease
    left_s: float
    why: str


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A registered job. demand: None while no gateway ever reported; run: None without a trainer's.

    first: version before which all weights are another run's.
    """

    record: JobRecord
    latest: int
    first: int
    demand: JobFigures | None
    run: pb.RunView | None


@dataclass(frozen=True, slots=True)
class Observed:
    """All of it. halted: policies whose canary is, and why. turns: replicas that may get turns.

    budget_left: share of the SLO budget, by deployment, None where nobody asked for it.
    """

    stop: HarvestMode = HarvestMode.ACTIVE
    overrides: Mapping[str, HarvestMode] = field(default_factory=dict)
    policies: tuple[CapacityPolicy, ...] = ()
    halted: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[NodeSeen, ...] = ()
    away: tuple[tuple[str, float], ...] = ()
    leases: tuple[LeaseSeen, ...] = ()
    turns: frozenset[str] = frozenset()
    jobs: tuple[JobSeen, ...] = ()
    usage: Mapping[Pair, Lent] = field(default_factory=dict)
    gateways: int = 0
    settling: bool = False
    budget_left: Mapping[str, float] | None = None


def observed(
    fleet: Fleet,
    leasing: Leasing,
    healths: HealthBook,
    jobs: JobRegistry,
    capacity: Capacity,
    demand: DemandBook,
    runs: RunBook,
    usage: UsageBook,
    now_s: float,
    *,
    budgets: bool,
) -> Observed:
    """Take everything at one moment; SLO budgets, which cost a walk over 30 days, where asked."""
    leases = leasing.leases()
    alone = jobs.only is not None
    return Observed(
        stop=capacity.stop.mode,
        overrides=dict(capacity.stop.overrides),
        policies=capacity.gate.policies,
        halted={
            policy.name: why
            for policy in capacity.gate.policies
            if (why := capacity.gate.halted(policy.name)) is not None
        },
        nodes=tuple(_node(view, capacity, now_s) for view in fleet.nodes),
        away=tuple(fleet.away(now_s)),
        leases=tuple(
            LeaseSeen(
                lease,
                max(0.0, lease.expires_s - now_s),
                "".join(reason.why for reason in leasing.explained(lease.replica)[-1:]),
            )
            for lease in leases
        ),
        turns=frozenset(
            lease.replica for lease in leases if healths.takes_turns(lease.replica, lease.job)
        ),
        jobs=tuple(
            JobSeen(
                job,
                jobs.latest(job.job),
                jobs.first(job.job),
                demand.figures(job.job, now_s, alone=alone),
                runs.view(job.job),
            )
            for job in jobs.live
        ),
        usage=usage.sums(now_s),
        gateways=len(demand),
        settling=leasing.settling(now_s),
        budget_left=capacity.gate.budget_left(now_s) if budgets else None,
    )


def _node(view: NodeView, capacity: Capacity, now_s: float) -> NodeSeen:
    verdict = capacity.gate.verdict(view.node)
    advice = capacity.advice_of(view.node)
    return NodeSeen(
        view.node,
        max(0.0, now_s - view.heard_s),
        view.labels,
        view.telemetry,
        tuple(view.offers.values()),
        verdict,
        stricter(capacity.stop.mode, verdict.mode),
        advice.now,
        advice.over_s,
        advice.byte_s,
        advice.compute_s,
        capacity.gate.busy_share(view.node),
    )

"""Read model of a leading scheduler: the whole fleet at one moment, taken in one walk of its loop.

    books of the core ──observe──► Observed ──► replies to operators (replies.py)
                                        ├─────► status of policies (policy_views.py)
                                        ├─────► /metrics
                                        └─────► dashboard

An `Observed` never changes, so its readers may work beside the loop. It holds no protobuf rows of
its own: a reply of a thousand nodes takes too long to be made each second.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic_scheduler import HarvestMode, Lease, Offer, ReplicaKind
from elastic_scheduler.capacity import Advice, CapacityPolicy, NodeVerdict, PolicyMode
from elastic_scheduler.leases.harvest_mode import stricter
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.capacity import Capacity
from rose.scheduler.core.demand import DemandBook, JobFigures
from rose.scheduler.core.fleet import Fleet, HealthBook, NodeView
from rose.scheduler.core.job_registry import JobRegistry
from rose.scheduler.core.leasing import Leasing
from rose.scheduler.core.runs import RunBook
from rose.scheduler.core.usage import Lent, Pair, UsageBook
from rose.scheduler.persistence import JobRecord, VersionRecord


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One attached node. mode: of its verdict and the operator's stop, the stricter.

    leased: guests under a lease that lets turns run. advice: what the node lends or would lend.
    obeyed_s: time from the newest order of modes to its confirmation, None until then.
    """

    node: str
    silent_s: float
    labels: Mapping[str, str]
    telemetry: pb.Telemetry
    offers: tuple[Offer, ...]
    verdict: NodeVerdict
    mode: HarvestMode
    leased: frozenset[str] = frozenset()
    advice: Advice = field(default_factory=Advice)
    busy: float | None = None
    kv_share: float | None = None
    cluster: str = ""
    release: str = ""
    obeys: bool = False
    obeyed_s: float | None = None


@dataclass(frozen=True, slots=True)
class AwaySeen:
    """A known node that is not attached, with its last known labels."""

    node: str
    away_s: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    """A live offer. holder: the job that has a lease of the replica, "" without one.

    lease: the lease under which turns may run, None without one.
    """

    offer: Offer
    holder: str
    lease: Lease | None
    takes_turns: bool


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """A lease that lives. why: the last decision about it."""

    lease: Lease
    left_s: float
    why: str


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A registered job. demand: None while no gateway ever reported; run: None without a trainer's.

    first: version before which all weights are another run's. chain: versions sent to nodes.
    """

    record: JobRecord
    latest: int
    first: int
    demand: JobFigures | None
    run: pb.RunView | None
    chain: tuple[VersionRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """The fleet at one moment. halted: reasons of halted canaries, by policy.

    of_objects: policies set by objects of Kubernetes. replicas: live offers by replica id.
    promised: leases whose epochs are not durable yet. budget_left: share of the SLO budget by
    deployment, None unless asked for.
    """

    stop: HarvestMode = HarvestMode.ACTIVE
    overrides: Mapping[str, HarvestMode] = field(default_factory=dict)
    policies: tuple[CapacityPolicy, ...] = ()
    of_objects: frozenset[str] = frozenset()
    halted: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[NodeSeen, ...] = ()
    away: tuple[AwaySeen, ...] = ()
    replicas: tuple[ReplicaSeen, ...] = ()
    leases: tuple[LeaseSeen, ...] = ()
    promised: int = 0
    jobs: tuple[JobSeen, ...] = ()
    usage: Mapping[Pair, Lent] = field(default_factory=dict)
    gateways: int = 0
    settling: bool = False
    budget_left: Mapping[str, float] | None = None

    @property
    def acts(self) -> bool:
        """True if any policy lets capacity be lent."""
        return any(policy.mode is PolicyMode.ACTIVE for policy in self.policies)

    @property
    def held(self) -> Counter[str]:
        """Nodes by the kind of their limits; a node counts once for each kind."""
        kinds = ({limit.kind.value for limit in node.verdict.limits} for node in self.nodes)
        return Counter(kind for each in kinds for kind in each)


@dataclass(frozen=True, slots=True)
class Books:
    """State of the core by subject."""

    fleet: Fleet
    leasing: Leasing
    healths: HealthBook
    jobs: JobRegistry
    capacity: Capacity
    demand: DemandBook
    runs: RunBook
    usage: UsageBook


def observe(books: Books, now_s: float, *, budgets: bool) -> Observed:
    """Take everything at one moment; SLO budgets, which cost a walk over 30 days, if asked for."""
    fleet, leasing, capacity, jobs = books.fleet, books.leasing, books.capacity, books.jobs
    gate = capacity.gate
    alone = jobs.only is not None
    return Observed(
        stop=capacity.stop.mode,
        overrides=dict(capacity.stop.overrides),
        policies=gate.policies,
        of_objects=capacity.of_objects,
        halted={
            policy.name: why
            for policy in gate.policies
            if (why := gate.halted(policy.name)) is not None
        },
        nodes=tuple(_node(view, books, now_s) for view in fleet.nodes),
        away=tuple(
            AwaySeen(node, away_s, fleet.labels_away(node)) for node, away_s in fleet.away(now_s)
        ),
        replicas=replicas_seen(books, now_s),
        leases=tuple(
            LeaseSeen(
                lease,
                max(0.0, lease.expires_s - now_s),
                "".join(reason.why for reason in leasing.explained(lease.replica)[-1:]),
            )
            for lease in leasing.leases()
        ),
        promised=leasing.promised,
        jobs=tuple(
            JobSeen(
                job,
                jobs.chain(job.job).latest,
                jobs.chain(job.job).first,
                books.demand.figures(job.job, now_s, alone=alone),
                books.runs.view(job.job),
                tuple(jobs.chain(job.job).records),
            )
            for job in jobs.live
        ),
        usage=books.usage.sums(now_s),
        gateways=len(books.demand),
        settling=leasing.settling(now_s),
        budget_left=gate.budget_left(now_s) if budgets else None,
    )


def replicas_seen(books: Books, now_s: float) -> tuple[ReplicaSeen, ...]:
    """Return all live offers with their leases, by replica id."""
    leasing, takes_turns = books.leasing, books.healths.takes_turns
    seen = []
    for offer in books.fleet.live_offers(now_s).values():
        name, lease = offer.replica, leasing.active(offer.replica, now_s)
        turns = takes_turns(name, lease.job if lease else "")
        seen.append(ReplicaSeen(offer, leasing.leased_to(name), lease, turns))
    return tuple(seen)


def _node(view: NodeView, books: Books, now_s: float) -> NodeSeen:
    capacity = books.capacity
    verdict = capacity.gate.verdict(view.node)
    return NodeSeen(
        view.node,
        max(0.0, now_s - view.heard_s),
        view.hello.labels,
        view.telemetry,
        tuple(view.offers.values()),
        verdict,
        stricter(capacity.stop.mode, verdict.mode),
        frozenset(
            offer.replica
            for offer in view.offers.values()
            if offer.kind is ReplicaKind.GUEST and books.leasing.active(offer.replica, now_s)
        ),
        # A copy: the book adds to its own with each judgement.
        replace(capacity.advice_of(view.node)),
        capacity.gate.busy_share(view.node),
        capacity.kv_share(view.node),
        view.hello.cluster,
        view.hello.release,
        view.hello.obeys,
        view.obeyed_s,
    )

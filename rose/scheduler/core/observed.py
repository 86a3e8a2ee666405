"""Read model of a leading scheduler: the whole fleet at one moment, taken in one walk of its loop.

    books of the core ──observe──► Observed ──► replies to operators, rows of the gateways' table
                                        ├─────► one view a policy: its status on its nodes
                                        ├─────► /metrics
                                        └─────► dashboard

An `Observed` never changes, so its readers may work beside the loop. It holds no protobuf rows of
its own: a reply of a thousand nodes takes too long to be made each second.

A policy counts a node as silent without a message within `staleAfter`. A stop is not done before
the node has measured that nothing is left, so a node is `behind` until then.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from elastic_scheduler import HarvestMode, Lease, Offer, ReplicaKind
from elastic_scheduler.capacity import (
    CLI,
    Advice,
    CapacityPolicy,
    EffectivePolicy,
    Limit,
    NodeVerdict,
    PolicyMode,
    effective,
)
from elastic_scheduler.capacity.budget_hold import BudgetLeft
from elastic_scheduler.capacity.effective import PATHS
from elastic_scheduler.capacity.policy import NodeSelector
from elastic_scheduler.leases.lease_table import stricter
from rose.errors import RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.capacity import MOST_BYTES, CapacityBook
from rose.scheduler.core.demand import DemandBook, JobFigures
from rose.scheduler.core.fleet import FleetBook, HealthBook, NodeView
from rose.scheduler.core.job_registry import JobRegistry
from rose.scheduler.core.leasing import Leasing
from rose.scheduler.core.limits import cut_text
from rose.scheduler.core.quotas import QuotaBook
from rose.scheduler.core.runs import RunBook
from rose.scheduler.core.usage import Lent, Pair, UsageBook
from rose.scheduler.persistence import JobRecord, VersionRecord
from rose.scheduler.wire import KIND_TO, MODE_TO


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """Attached node in a fleet snapshot. mode: the stricter of its verdict and the operator's stop.

    silent_s: seconds since its last message. leased: its guests that have a lease for turns.
    advice: memory and compute that the node lends or would lend. obeyed_s: seconds from the newest
    order of modes to the node's confirmation, None until confirmed.
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
    """Known node that is not attached, with seconds since its last message and its last labels."""

    node: str
    away_s: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    """Replica with a live offer. holder: the job that has a lease of it, "" if there is none.

    lease: the lease under which turns may run, None without one. takes_turns: health allows turns.
    """

    offer: Offer
    holder: str
    lease: Lease | None
    takes_turns: bool


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """Live lease in a fleet snapshot. left_s: seconds until it expires. why: its last reason."""

    lease: Lease
    left_s: float
    why: str


@dataclass(frozen=True, slots=True)
class JobSeen:
    """Registered job in a fleet snapshot. latest: its newest version, 0 before the first.

    first: version before which all weights are another run's. demand: sum of the gateways' reports,
    None before any gateway reported. run: the trainer's run, None without one. chain: versions of
    which nodes are told. quota: guests that its placeholder pods allow, None without a quota or
    before they were read. held_back: why its quota admits no new guest.
    """

    record: JobRecord
    latest: int
    first: int
    demand: JobFigures | None
    run: pb.RunView | None
    chain: tuple[VersionRecord, ...] = ()
    quota: int | None = None
    held_back: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """Immutable snapshot of the fleet. halted: reasons of halted canaries, by policy name.

    of_objects: names of policies that are Kubernetes objects. replicas: live offers in the order of
    replica ids. promised: number of leases whose epochs are not durable yet. budget_left: rest
    of the SLO budget by deployment, None if not asked for.
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
    budget_left: Mapping[str, BudgetLeft] | None = None

    @property
    def acts(self) -> bool:
        """True if any policy has mode Active, so that capacity may be lent."""
        return any(policy.mode is PolicyMode.ACTIVE for policy in self.policies)

    @property
    def held(self) -> Counter[str]:
        """Number of nodes by the kind of limit that holds their lending back.

        A node counts once for each kind.
        """
        kinds = ({limit.kind.value for limit in node.verdict.limits} for node in self.nodes)
        return Counter(kind for each in kinds for kind in each)


@dataclass(frozen=True, slots=True)
class Books:
    """State of the scheduler core, in one object for each subject."""

    fleet: FleetBook
    leasing: Leasing
    healths: HealthBook
    jobs: JobRegistry
    capacity: CapacityBook
    demand: DemandBook
    runs: RunBook
    usage: UsageBook
    quotas: QuotaBook


def observe(books: Books, now_s: float, *, budgets: bool) -> Observed:
    """Return an immutable snapshot of the fleet at `now_s`.

    budgets: compute the remaining SLO budgets too, which is slow.
    """
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
                books.quotas.pods.get(job.job),
                books.quotas.why(job.job, now_s),
            )
            for job in jobs.live
        ),
        usage=books.usage.sums(now_s),
        gateways=len(books.demand),
        settling=leasing.settling(now_s),
        budget_left=gate.budgets.left(now_s) if budgets else None,
    )


def _live_replicas(books: Books, now_s: float) -> Iterator[tuple[Offer, Lease | None, bool]]:
    """Yield each live offer in the order of replica ids, with the lease under which turns may run
    and True if the replica's health allows turns.
    """
    active, takes_turns = books.leasing.active, books.healths.takes_turns
    for offer in books.fleet.live_offers(now_s).values():
        lease = active(offer.replica, now_s)
        yield offer, lease, takes_turns(offer.replica, lease.job if lease else "")


def replicas_seen(books: Books, now_s: float) -> tuple[ReplicaSeen, ...]:
    """Return all replicas with live offers, with their leases, in the order of replica ids."""
    holder = books.leasing.leased_to
    return tuple(
        ReplicaSeen(offer, holder(offer.replica), lease, turns)
        for offer, lease, turns in _live_replicas(books, now_s)
    )


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


# All of these hold together: none of them is stricter than another.
JOINED: Final = frozenset({"maxHarvest.nodes", "blackoutWindows", "tenants"})
DRAINS: Final = (HarvestMode.OFF, HarvestMode.HOLD_AND_DRAIN)


@dataclass(slots=True)
class PolicyView:
    """Status of a policy in force over its nodes.

    stop: the operator's stop, which stands above all policies. nodes: number of attached nodes that
    the policy selects. lending: those with a leased guest. silent: seconds since the last message,
    of nodes not heard within `staleAfter` or not attached. behind: reasons, by node that does not
    keep to the policy yet. seen: number of nodes that keep to it. limits: for each kind of limit,
    the number of nodes and one reason in full. stricter: number of nodes on which another policy
    decides a field that this one sets, by (policy, field). modes: number of nodes by the mode that
    holds on them, the stop included.
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
    """Return the status of every policy in force on its nodes, by policy name."""
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
    """Return the reason why a node does not keep to its verdict yet, "" if it does."""
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
    """Count a node in the view once for each kind of its limits, and keep one text of each kind."""
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


def replica_rows(books: Books, now_s: float) -> list[pb.Replica]:
    """Return the row of the gateways' table for each replica with a live offer."""
    return [_replica(*live) for live in _live_replicas(books, now_s)]


def snapshot(seen: Observed) -> pb.SnapshotReply:
    """Return the whole fleet as the reply to `rose status`.

    Its harvest mode is OFF if no policy has mode Active.
    """
    telemetry = [node.telemetry for node in seen.nodes]
    return pb.SnapshotReply(
        replicas=[_replica(each.offer, each.lease, each.takes_turns) for each in seen.replicas],
        leases=[
            pb.LeaseView(
                id=each.lease.id,
                job=each.lease.job,
                replica=each.lease.replica,
                epoch=each.lease.epoch,
                expires_in_s=each.left_s,
                state=each.lease.state.value,
                why=each.why,
            )
            for each in seen.leases
        ],
        hosts=[
            host
            for each in telemetry
            if each.HasField("host")
            for host in each.hosts or (each.host,)
        ],
        guests=[guest for each in telemetry for guest in each.guests],
        harvest=MODE_TO[seen.stop if seen.acts else HarvestMode.OFF],
        latest_version=seen.jobs[0].latest if len(seen.jobs) == 1 else 0,
        jobs=[_job(job, seen) for job in seen.jobs],
        overrides=[
            pb.HarvestOverride(replica=replica, mode=MODE_TO[mode])
            for replica, mode in sorted(seen.overrides.items())
        ],
        # A line for each node, unless no operator applied a policy.
        capacity=[]
        if {policy.name for policy in seen.policies} <= {CLI}
        else [_capacity(node, seen.stop) for node in _by_name(seen)],
        away=[pb.AwayNode(node=each.node, away_s=each.away_s) for each in seen.away],
        nodes=[_attached(node) for node in seen.nodes],
    )


def explained(seen: Observed, name: str) -> list[pb.NodeCapacity]:
    """Return, for one node or all (""), the policy behind each field of its effective policy.

    Raises RefusedError if no such node is attached.
    """
    nodes = [node for node in _by_name(seen) if name in ("", node.node)]
    if name and not nodes:
        raise RefusedError(f"no node {name!r} is attached; `rose status` lists nodes")
    rows = []
    for node in nodes:
        row = _capacity(node, seen.stop)
        row.fields.extend(
            pb.PolicyField(path=path, value=value, policy=policy)
            for path, value, policy in node.verdict.policy.fields()
        )
        rows.append(row)
    return rows


def _by_name(seen: Observed) -> list[NodeSeen]:
    return sorted(seen.nodes, key=lambda node: node.node)


def _replica(offer: Offer, lease: Lease | None, takes_turns: bool) -> pb.Replica:
    return pb.Replica(
        id=offer.replica,
        kind=KIND_TO[offer.kind],
        url=offer.url,
        node=offer.node,
        leased=lease is not None,
        lease_epoch=lease.epoch if lease else 0,
        policy_version=offer.policy_version,
        max_sequences=offer.max_sequences,
        healthy=takes_turns,
        job=lease.job if lease else "",
        held_job=offer.job,
        model=offer.model,
        kv_tokens=offer.kv_tokens,
        decode_tok_s=offer.decode_tok_s,
        prefill_tok_s=offer.prefill_tok_s,
    )


def _attached(node: NodeSeen) -> pb.AttachedNode:
    replicas = {offer.replica for offer in node.offers}
    return pb.AttachedNode(
        node=node.node,
        silent_s=node.silent_s,
        cluster=node.cluster,
        release=node.release,
        obeys=node.obeys,
        obeyed_s=node.obeyed_s,
        replicas=sorted(replicas | {guest.replica for guest in node.telemetry.guests}),
    )


def _job(job: JobSeen, seen: Observed) -> pb.JobView:
    record, chain, demand = job.record, job.chain, job.demand
    leased = [each.offer for each in seen.replicas if each.holder == record.job]
    view = pb.JobView(
        job=record.job,
        latest_version=chain[-1].version if chain else 0,
        chain=len(chain),
        first_version=chain[0].version if chain else 0,
        base=bool(chain) and chain[0].is_base,
        standing=record.standing,
        run=job.run,
        max_staleness=record.max_staleness,
        model=record.model,
        weight=record.weight,
        max_guests=record.max_guests,
        leased=len(leased),
        guests=sum(each.kind is ReplicaKind.GUEST for each in leased),
        quota=job.quota,
        held_back=job.held_back,
    )
    if demand is not None:
        view.demand_known = True
        view.turns = demand.turns
        view.owed_tokens = demand.owed_tokens
        view.made_tok_s = demand.made_tok_s
    return view


def _capacity(node: NodeSeen, stop: HarvestMode) -> pb.NodeCapacity:
    verdict, advice = node.verdict, node.advice
    limits = [cut_text(limit.text) for limit in verdict.limits]
    if stop is not HarvestMode.ACTIVE:
        limits.insert(0, f"the operator's stop: {stop.value}")
    if node.kv_share is not None:
        limits.extend(_pressed(verdict.policy, node.kv_share))
    return pb.NodeCapacity(
        node=node.node,
        mode=MODE_TO[node.mode],
        would=MODE_TO[verdict.would],
        limits=limits,
        policies=verdict.policy.policies,
        policy_mode=verdict.policy.mode.value,
        lend_bytes=advice.now.memory_bytes,
        lend_compute=advice.now.compute,
        advised_s=advice.over_s,
        advised_byte_s=advice.byte_s,
        advised_compute_s=advice.compute_s,
        busy_share=node.busy,
        kv_share=node.kv_share,
    )


def _pressed(policy: EffectivePolicy, kv_share: float) -> Iterator[str]:
    """Yield the reason if the host's KV cache use is above the policy's high watermark."""
    if policy.watermarks is not None and kv_share > policy.watermarks.high:
        whose = policy.decided_by.get("watermarks", "")
        of = f" ({whose})" if whose else ""
        yield f"watermarks.high (kv {kv_share:.0%} > {policy.watermarks.high:.0%}){of}"

"""Replies to operators and rows of the gateways' table, made of the read model."""

from collections.abc import Iterable, Iterator

from elastic_scheduler import HarvestMode, ReplicaKind
from elastic_scheduler.capacity import CLI, EffectivePolicy
from rose.errors import RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.limits import cut_text
from rose.scheduler.core.observed import JobSeen, NodeSeen, Observed, ReplicaSeen
from rose.scheduler.wire import KIND_TO, MODE_TO


def replica_rows(replicas: Iterable[ReplicaSeen]) -> list[pb.Replica]:
    """Return a row for each live offer."""
    return [_replica(each) for each in replicas]


def snapshot(seen: Observed) -> pb.SnapshotReply:
    """Return the reply to an operator's question about the whole fleet.

    Its mode is OFF if no policy lets anything be lent.
    """
    telemetry = [node.telemetry for node in seen.nodes]
    return pb.SnapshotReply(
        replicas=replica_rows(seen.replicas),
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
    """Return the policy behind each field, for one node or all (""). RefusedError if unknown."""
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


def _replica(seen: ReplicaSeen) -> pb.Replica:
    offer, lease = seen.offer, seen.lease
    return pb.Replica(
        id=offer.replica,
        kind=KIND_TO[offer.kind],
        url=offer.url,
        node=offer.node,
        leased=lease is not None,
        lease_epoch=lease.epoch if lease else 0,
        policy_version=offer.policy_version,
        max_sequences=offer.max_sequences,
        healthy=seen.takes_turns,
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
    """Yield why guests' KV memory shrinks if their host uses more of its cache than allowed."""
    if policy.watermarks is not None and kv_share > policy.watermarks.high:
        whose = policy.decided_by.get("watermarks", "")
        of = f" ({whose})" if whose else ""
        yield f"watermarks.high (kv {kv_share:.0%} > {policy.watermarks.high:.0%}){of}"

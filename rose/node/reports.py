"""Reports of a node to its scheduler, and the figures of its replicas for `/metrics`."""

from collections.abc import Sequence
from dataclasses import replace

from executor import GuestState
from rose.node.config import ReplicaConfig
from rose.node.grants.guard_thread import GuardThread
from rose.node.hosts.host import summed
from rose.node.replica import Replica
from rose.node.telemetry.node_metrics import ReplicaFigures
from rose.rpc import rose_pb2

OFFER_TTL_S = 3.0
_KINDS = {
    "guest": rose_pb2.REPLICA_KIND_GUEST,
    "dedicated": rose_pb2.REPLICA_KIND_DEDICATED,
}


def build_reports(
    node: str,
    replicas: Sequence[Replica],
    hosts: Sequence[rose_pb2.HostTelemetry] = (),
    left: tuple[int, int] = (0, 0),
) -> list[rose_pb2.NodeReport]:
    """Return the offers of all replicas, then the telemetry of hosts and guests.

    `left`: requests of hosts that are gone, which met their targets and did not.
    """
    offers = rose_pb2.Offers(offers=[_offer(replica) for replica in replicas])
    telemetry = rose_pb2.Telemetry(
        guests=[_guest(replica) for replica in replicas],
        hosts=hosts if len(hosts) > 1 else (),
    )
    if hosts:
        telemetry.host.CopyFrom(summed(hosts, left))
    return [
        rose_pb2.NodeReport(node=node, offers=offers),
        rose_pb2.NodeReport(node=node, telemetry=telemetry),
    ]


def view_of(replica: Replica) -> ReplicaFigures:
    """Return a replica's figures for `/metrics`."""
    guard, reclaimer = replica.guard, replica.reclaimer
    view = ReplicaFigures(
        name=replica.config.id,
        state=replica.supervisor.state.value,
        restarts=replica.supervisor.restarts,
        policy_version=replica.version,
    )
    if guard is None:
        return view
    return replace(
        view,
        duty=guard.duty(),
        granted=guard.granted,
        grant=guard.grant,
        guest=guard.guest,
        owed_bytes=guard.owed_bytes,
        held=reclaimer.held() if reclaimer else None,
        reclaim_s=replica.reclaim_s,
        host=replica.host.config.name if replica.host else "",
    )


def _offer(replica: Replica) -> rose_pb2.Offer:
    config = replica.config
    return rose_pb2.Offer(
        replica=config.id,
        kind=_KINDS[config.kind],
        url=replica.url,
        kv_tokens=config.kv_tokens,
        decode_tok_s=config.decode_tok_s,
        prefill_tok_s=config.prefill_tok_s,
        max_sequences=config.max_sequences,
        policy_version=replica.version,
        job=replica.job,
        model=replica.model,
        models=sorted(replica.config.folders.keys() - {replica.model}),
        near=replica.near,
        healthy=replica.offered,
        ttl_s=OFFER_TTL_S,
        epoch=replica.lease_agent.core.status().epoch,
        held=replica.lease_agent.held(),
    )


def _guest(replica: Replica) -> rose_pb2.GuestTelemetry:
    guard = replica.guard
    grant = guard.grant if guard else None
    state = (guard.guest or GuestState()) if guard else replica.gauge.reading
    reason = "" if grant is None else grant.reason
    if grant is not None and grant.token_budget and isinstance(state, GuestState):
        reason = state.gate_reason
    return rose_pb2.GuestTelemetry(
        replica=replica.config.id,
        lend_bytes=_lend_bytes(replica.config, guard),
        kv_bytes=state.bytes_mapped if isinstance(state, GuestState) else 0,
        mode=grant.mode.name.lower() if grant else "none",
        reason=reason,
        tokens_total=state.tokens_total,
        running=state.running,
        waiting=state.waiting,
        duty=guard.duty() if guard else 1.0,
        policy_version=replica.version,
        state=replica.supervisor.state.value,
        restarts=replica.supervisor.restarts,
        held_bytes=replica.held_though_barred,
    )


def _lend_bytes(config: ReplicaConfig, guard: GuardThread | None) -> int | None:
    """KV memory of a guest that has everything; beyond its own only what its host does not use."""
    if guard is None:
        return None
    own, host = config.kv_base_bytes, guard.host
    if own is None or own >= config.kv_bytes:
        return config.kv_bytes
    if host is None or not host.kv_total:
        return own
    return own + round((config.kv_bytes - own) * (1.0 - host.kv_used / host.kv_total))

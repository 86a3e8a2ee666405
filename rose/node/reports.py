"""What a node tells the scheduler: offers and telemetry, built from what it knows now."""

from collections.abc import Mapping
from dataclasses import replace

from executor import GuestState
from rose.node.config import NodeConfig
from rose.node.guard_thread import GuardThread
from rose.node.host_watch import HostWatch
from rose.node.live_metrics import ReplicaView
from rose.node.memory import Held
from rose.node.replica import Replica
from rose.rpc import rose_pb2

OFFER_TTL_S = 3.0
_KINDS = {
    "guest": rose_pb2.REPLICA_KIND_GUEST,
    "dedicated": rose_pb2.REPLICA_KIND_DEDICATED,
}


def build_reports(
    config: NodeConfig,
    replicas: Mapping[str, Replica],
    guards: Mapping[str, GuardThread],
    watch: HostWatch | None,
) -> list[rose_pb2.NodeReport]:
    """Offers of all replicas, then telemetry of host and guests."""
    offers = rose_pb2.Offers(offers=[_offer(replica) for replica in replicas.values()])
    telemetry = rose_pb2.Telemetry(
        guests=[_guest(replica, guards.get(name)) for name, replica in replicas.items()]
    )
    if config.host and watch:
        telemetry.host.CopyFrom(_host(config, guards, watch))
    return [
        rose_pb2.NodeReport(node=config.node, offers=offers),
        rose_pb2.NodeReport(node=config.node, telemetry=telemetry),
    ]


def view_of(replica: Replica, guard: GuardThread | None, held: Held | None) -> ReplicaView:
    """What `/metrics` shows of a replica."""
    view = ReplicaView(
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
        host=guard.host,
        owed_bytes=guard.owed_bytes,
        held=held,
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
        healthy=replica.offered,
        ttl_s=OFFER_TTL_S,
        epoch=replica.tenant.core.held.epoch,
    )


def _host(
    config: NodeConfig, guards: Mapping[str, GuardThread], watch: HostWatch
) -> rose_pb2.HostTelemetry:
    assert config.host is not None
    state = next((guard.host for guard in guards.values() if guard.host), None)
    summary = watch.summary()
    return rose_pb2.HostTelemetry(
        node=config.node,
        busy_ns=state.busy_ns if state else 0,
        running=state.running if state else 0,
        waiting=state.waiting if state else 0,
        window_requests=summary.requests,
        window_s=summary.window_s,
        ttft_p50_s=summary.ttft_p50_s,
        ttft_p95_s=summary.ttft_p95_s,
        tpot_p50_s=summary.tpot_p50_s,
        tpot_p95_s=summary.tpot_p95_s,
        ttft_target_s=config.host.ttft_target_s,
        tpot_target_s=config.host.tpot_target_s,
    )


def _guest(replica: Replica, guard: GuardThread | None) -> rose_pb2.GuestTelemetry:
    grant = guard.grant if guard else None
    state = (guard.guest or GuestState()) if guard else replica.gauge.reading
    reason = "" if grant is None else grant.reason
    if grant is not None and grant.token_budget and isinstance(state, GuestState):
        reason = state.gate_reason
    return rose_pb2.GuestTelemetry(
        replica=replica.config.id,
        mode=grant.mode.name.lower() if grant else "none",
        reason=reason,
        tokens_total=state.tokens_total,
        running=state.running,
        waiting=state.waiting,
        duty=guard.duty() if guard else 1.0,
        policy_version=replica.version,
        state=replica.supervisor.state.value,
        restarts=replica.supervisor.restarts,
    )

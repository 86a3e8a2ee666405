"""The tables that leave the scheduler: for gateways on every change, for operators on request."""

from elastic_scheduler import HarvestPolicy, Offer
from rose.rpc import rose_pb2 as pb
from rose.scheduler.demand import DemandBook, JobFigures
from rose.scheduler.fleet import Fleet
from rose.scheduler.health_book import HealthBook
from rose.scheduler.leasing import Leasing
from rose.scheduler.saved import JobRecord
from rose.scheduler.versions import VersionChain
from rose.scheduler.wire import KIND_TO, MODE_TO


def replica_rows(
    fleet: Fleet, leasing: Leasing, healths: HealthBook, now_s: float
) -> list[pb.Replica]:
    """One row for each live offer, by replica id."""
    return [_row(offer, leasing, healths, now_s) for offer in fleet.live_offers(now_s)]


def _row(offer: Offer, leasing: Leasing, healths: HealthBook, now_s: float) -> pb.Replica:
    lease = leasing.active(offer.replica, now_s)
    return pb.Replica(
        id=offer.replica,
        kind=KIND_TO[offer.kind],
        url=offer.url,
        node=offer.node,
        leased=lease is not None,
        lease_epoch=lease.epoch if lease else 0,
        policy_version=offer.policy_version,
        max_sequences=offer.max_sequences,
        healthy=healths.takes_turns(offer.replica),
        job=lease.job if lease else "",
        kv_tokens=offer.kv_tokens,
        decode_tok_s=offer.decode_tok_s,
        prefill_tok_s=offer.prefill_tok_s,
    )


def snapshot(
    fleet: Fleet,
    leasing: Leasing,
    healths: HealthBook,
    chain: VersionChain,
    policy: HarvestPolicy,
    demand: DemandBook,
    now_s: float,
) -> pb.SnapshotReply:
    """Everything an operator may ask about."""
    told = [view.telemetry for view in fleet.nodes]
    jobs = [chain.job] if chain.job else []
    return pb.SnapshotReply(
        replicas=replica_rows(fleet, leasing, healths, now_s),
        leases=[
            pb.LeaseView(
                id=lease.id,
                job=lease.job,
                replica=lease.replica,
                epoch=lease.epoch,
                expires_in_s=max(0.0, lease.expires_s - now_s),
                state=lease.state.value,
                why="".join(reason.why for reason in leasing.explained(lease.replica)[-1:]),
            )
            for lease in leasing.leases()
        ],
        hosts=[telemetry.host for telemetry in told if telemetry.HasField("host")],
        guests=[guest for telemetry in told for guest in telemetry.guests],
        harvest=MODE_TO[policy.mode],
        latest_version=chain.latest,
        jobs=[_job(job, chain.latest, demand.figures(job.job, now_s)) for job in jobs],
        overrides=[
            pb.HarvestOverride(replica=replica, mode=MODE_TO[mode])
            for replica, mode in sorted(policy.overrides.items())
        ],
    )


def _job(job: JobRecord, latest: int, demand: JobFigures | None) -> pb.JobView:
    view = pb.JobView(job=job.job, latest_version=latest, max_staleness=job.max_staleness)
    if demand is not None:
        view.demand_known = True
        view.turns = demand.turns
        view.owed_tokens = demand.owed_tokens
        view.made_tok_s = demand.made_tok_s
    return view

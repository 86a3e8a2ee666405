"""Conversion between protobuf messages and the core's types, which checks their bounds.

Each function raises `ConfigError`, a line for the peer, for a message that means nothing. An offer
that means nothing is left out, and the others of its report count.
"""

import math
from collections.abc import Iterable

from elastic_scheduler import HarvestMode, Lease, Offer, ReplicaKind
from rose.addresses import checked_url
from rose.errors import ConfigError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import MOST, JobFigures, Switched
from rose.scheduler.core.limits import (
    MAX_HOSTS,
    MAX_JOBS,
    MAX_LABELS,
    MAX_MODELS,
    MAX_REPLICAS,
    MAX_SWITCHES,
    check_number,
    checked_figure,
    checked_name,
    checked_version,
    cut_text,
)
from rose.scheduler.core.messages import (
    Activated,
    Attached,
    Demanded,
    Event,
    HarvestSet,
    Held,
    JobDropped,
    JobEnded,
    JobRegistered,
    Obeyed,
    Offered,
    RatesMeasured,
    ReplicaDrained,
    RevokeAsked,
    RunEnded,
    RunRenewed,
    TakenBack,
    VersionAnnounced,
)
from rose.scheduler.core.runs import Claim
from rose.scheduler.persistence import MAX_WEIGHT

# A node that asks for more is taken at its word only this long: silence must end a lease soon.
MAX_OFFER_TTL_S = 10.0

KIND_OF = {
    pb.REPLICA_KIND_GUEST: ReplicaKind.GUEST,
    pb.REPLICA_KIND_DEDICATED: ReplicaKind.DEDICATED,
}
KIND_TO = {kind: number for number, kind in KIND_OF.items()}
MODE_OF = {
    pb.HARVEST_MODE_OFF: HarvestMode.OFF,
    pb.HARVEST_MODE_HOLD: HarvestMode.HOLD,
    pb.HARVEST_MODE_HOLD_AND_DRAIN: HarvestMode.HOLD_AND_DRAIN,
    pb.HARVEST_MODE_ACTIVE: HarvestMode.ACTIVE,
}
MODE_TO = {mode: number for number, mode in MODE_OF.items()}


def mode_of(number: "pb.HarvestMode.ValueType") -> HarvestMode:
    """The mode of a request. Raises `ConfigError` for an unspecified or unknown one."""
    if number not in MODE_OF:
        raise ConfigError(f"harvest mode {number} is unknown; send OFF, HOLD, …, ACTIVE")
    return MODE_OF[number]


# ---- nodes ----


def attached(first: pb.NodeReport, stream: int) -> Attached:
    """A node's hello."""
    hello = first.hello
    node = checked_name(first.node, "the node's name")
    cluster = hello.cluster and checked_name(hello.cluster, f"the cluster of node {node}")
    relay = hello.relay_url and checked_url(hello.relay_url, f"the relay_url of node {node}")
    check_number(hello.labels, MAX_LABELS, f"labels of node {node}")
    labels = {
        checked_name(key, f"a label of node {node}"): cut_text(value)
        for key, value in hello.labels.items()
    }
    return Attached(
        node,
        stream,
        cluster,
        relay,
        labels,
        hello.takes_caps,
        hello.takes_renewals,
        cut_text(hello.release),
        hello.obeys,
    )


def event_of(report: pb.NodeReport, stream: int) -> Event | None:
    """What a report means to the core; None for a repeated hello or a kind of a newer protocol."""
    match report.WhichOneof("report"):
        case "offers":
            return _offered(report, stream)
        case "telemetry":
            return _measured(report.telemetry, stream)
        case "revocation":
            taken = report.revocation
            return TakenBack(stream, _replica(taken.replica), taken.epoch, cut_text(taken.reason))
        case "released":
            drained = report.released
            return ReplicaDrained(stream, _replica(drained.replica), drained.epoch, drained.aborted)
        case "activation":
            done = report.activation
            replica = _replica(done.replica)
            version = checked_version(done.version, f"the version of {replica}")
            job = _job(done.job, replica)
            return Activated(stream, replica, version, done.ok, cut_text(done.message), job)
        case "obeyed":
            return Obeyed(stream, report.obeyed.order)
        case _:
            return None


def _replica(name: str) -> str:
    return checked_name(name, "a replica's name")


def _job(name: str, replica: str) -> str:
    return name and checked_name(name, f"the job of {replica}")


def _models(names: Iterable[str], replica: str) -> tuple[str, ...]:
    models = tuple(checked_name(name, f"a model of {replica}") for name in names)
    check_number(models, MAX_MODELS, f"models of {replica}")
    return models


def _offered(report: pb.NodeReport, stream: int) -> Offered:
    check_number(report.offers.offers, MAX_REPLICAS, f"offers of node {report.node}")
    offers, refused, held = [], [], []
    for message in report.offers.offers:
        try:
            offers.append(offer_of(message, report.node))
            if message.HasField("held"):
                held.append(_held(message))
        except (ValueError, ConfigError) as error:
            refused.append(cut_text(str(error)))
    return Offered(stream, tuple(offers), tuple(refused), tuple(held))


def _held(message: pb.Offer) -> Held:
    held = message.held
    job = checked_name(held.job, f"the job of the lease that {message.replica} holds")
    left_s = checked_figure(held.left_s, f"left_s of {message.replica}")
    return Held(message.replica, job, held.epoch, left_s)


def offer_of(message: pb.Offer, node: str) -> Offer:
    """One offer. Raises ValueError and `ConfigError` for what no replica can mean."""
    replica = _replica(message.replica)
    if message.kind not in KIND_OF:
        raise ValueError(f"the offer of {replica} has no kind; send GUEST or DEDICATED")
    if not math.isfinite(message.ttl_s):
        raise ValueError(f"ttl_s of {replica} is {message.ttl_s}; offer for some seconds")
    return Offer(
        replica=replica,
        kind=KIND_OF[message.kind],
        url=checked_url(message.url, f"the url of {replica}"),
        node=node,
        kv_tokens=message.kv_tokens,
        decode_tok_s=message.decode_tok_s,
        prefill_tok_s=message.prefill_tok_s,
        policy_version=message.policy_version,
        healthy=message.healthy,
        ttl_s=min(MAX_OFFER_TTL_S, message.ttl_s),
        epoch=message.epoch,
        max_sequences=message.max_sequences,
        job=_job(message.job, replica),
        model=message.model and checked_name(message.model, f"the model of {replica}"),
        models=_models(message.models, replica),
        near=_models(message.near, replica),
    )


def _measured(telemetry: pb.Telemetry, stream: int) -> RatesMeasured:
    """Kept and shown as it is, so its texts are cut and its figures are figures."""
    check_number(telemetry.guests, MAX_REPLICAS, "guests of a node's telemetry")
    check_number(telemetry.hosts, MAX_HOSTS, "hosts of a node's telemetry")
    kept = pb.Telemetry()
    kept.CopyFrom(telemetry)
    kept.DiscardUnknownFields()  # type: ignore[no-untyped-call,unused-ignore]
    said: list[pb.HostTelemetry | pb.GuestTelemetry] = [*kept.guests, *kept.hosts]
    if kept.HasField("host"):
        said.append(kept.host)
    for message in said:
        for field, value in message.ListFields():
            if isinstance(value, float):
                checked_figure(value, f"{field.name} of a node's telemetry")
            elif isinstance(value, str):
                setattr(message, field.name, cut_text(value))
    return RatesMeasured(stream, kept)


# ---- gateways ----


def demanded(report: pb.DemandReport) -> Demanded:
    """What a gateway reports; a name that is no registered job's counts for nothing."""
    gateway = checked_name(report.gateway, "DemandReport.gateway")
    check_number(report.jobs, MAX_JOBS, f"jobs of gateway {gateway}")
    check_number(report.switches, MAX_SWITCHES, f"switches of gateway {gateway}")
    jobs = tuple(
        JobFigures(cut_text(each.job), each.turns, each.owed_tokens, each.made_tok_s)
        for each in report.jobs
    )
    for job in jobs:
        checked_figure(job.owed_tokens, f"owed_tokens of gateway {gateway}", MOST)
        checked_figure(job.made_tok_s, f"made_tok_s of gateway {gateway}", MOST)
    return Demanded(gateway, jobs, tuple(_switched(each) for each in report.switches))


def _switched(message: pb.Switch) -> Switched:
    replica = _replica(message.replica)
    took_s = checked_figure(message.took_s, f"took_s of {replica}", MOST)
    return Switched(replica, message.epoch, took_s)


# ---- trainers and operators ----


def job_registered(request: pb.RegisterJobRequest) -> JobRegistered:
    """A trainer's job."""
    job = checked_name(request.job, "RegisterJob.job")
    model = request.model and checked_name(request.model, f"the model of {job}")
    weight = checked_figure(request.weight, f"the weight of {job}", MAX_WEIGHT) or 1.0
    return JobRegistered(
        job,
        request.max_staleness,
        model,
        weight,
        request.max_guests,
        claim=claim_of(request.claim) if request.HasField("claim") else None,
        take_over=request.take_over,
    )


def claim_of(claim: pb.Claim) -> Claim:
    """One process of a run."""
    run = checked_name(claim.run, "Claim.run")
    return Claim(run, checked_name(claim.process, "Claim.process"), cut_text(claim.holder))


def run_renewed(request: pb.RenewRunRequest) -> RunRenewed:
    """A trainer that lives."""
    return RunRenewed(checked_name(request.job, "RenewRun.job"), claim_of(request.claim))


def run_ended(request: pb.EndRunRequest) -> RunEnded:
    """A trainer that ends."""
    return RunEnded(checked_name(request.job, "EndRun.job"), claim_of(request.claim))


def job_dropped(request: pb.DropJobRequest) -> JobDropped:
    """A job that an operator wants forgotten."""
    return JobDropped(checked_name(request.job, "DropJob.job"), request.force)


def job_ended(request: pb.EndJobRequest) -> JobEnded:
    """A job that needs nothing any more."""
    claim = claim_of(request.claim) if request.HasField("claim") else None
    return JobEnded(checked_name(request.job, "EndJob.job"), claim)


def version_announced(request: pb.AnnounceVersionRequest) -> VersionAnnounced:
    """A trainer's new version."""
    job = checked_name(request.job, "AnnounceVersion.job")
    version = checked_version(request.version, f"the version of {job}")
    parent = checked_version(request.parent, f"the parent of version {version}")
    url = checked_url(request.url, f"the url of version {version}")
    claim = claim_of(request.claim) if request.HasField("claim") else None
    return VersionAnnounced(job, version, parent, url, claim)


def harvest_set(request: pb.SetHarvestRequest) -> HarvestSet:
    """An operator's mode."""
    replica = request.replica and checked_name(request.replica, "SetHarvest.replica")
    return HarvestSet(mode_of(request.mode), replica or None, opens=not request.stop_alone)


def revoke_asked(request: pb.RevokeRequest) -> RevokeAsked:
    """An operator's revocation."""
    replica = checked_name(request.replica, "Revoke.replica")
    return RevokeAsked(replica, cut_text(request.reason))


# ---- to nodes ----


def lease_command(lease: Lease, ttl_s: float, model: str = "", version: int = 0) -> pb.NodeCommand:
    """Grant or renewal; `model` and newest `version` of the job."""
    return pb.NodeCommand(
        lease=pb.Lease(
            id=lease.id,
            job=lease.job,
            replica=lease.replica,
            epoch=lease.epoch,
            ttl_s=ttl_s,
            model=model,
            version=version,
        )
    )


def release_command(lease: Lease, reason: str) -> pb.NodeCommand:
    """Order to drain a replica."""
    return pb.NodeCommand(
        release=pb.Release(replica=lease.replica, epoch=lease.epoch, reason=reason)
    )


def harvest_command(mode: HarvestMode, replica: str = "") -> pb.NodeCommand:
    """The mode that holds for a replica, or for the node ("")."""
    return pb.NodeCommand(harvest=pb.Harvest(mode=MODE_TO[mode], replica=replica))


# ---- to gateways ----

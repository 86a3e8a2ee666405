"""Conversion between protobuf messages and the core's types, which checks their bounds.

    request, report ──read──► event: each field of the same name, checked as its type says
                                     (`rose.scheduler.core.limits`)

Each function raises `ConfigError`, a line for the peer, for a message that means nothing. An offer
that means nothing is left out, and the others of its report count.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from google.protobuf.message import Message

from elastic_scheduler import HarvestMode, Lease, Offer, ReplicaKind
from elastic_scheduler.capacity import parse_policy
from elastic_scheduler.errors import PolicyError
from rose.addresses import checked_url
from rose.errors import ConfigError
from rose.rpc import rose_pb2 as pb
from rose.rpc.reading import read
from rose.scheduler.core.demand import JobFigures, Switched
from rose.scheduler.core.limits import (
    MAX_HOSTS,
    MAX_JOBS,
    MAX_MODELS,
    MAX_REPLICAS,
    MAX_SWITCHES,
    check_number,
    checked_figure,
    checked_name,
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
    PolicyApplied,
    PolicyDeleted,
    RatesMeasured,
    ReplicaDrained,
    RevokeAsked,
    RunEnded,
    RunRenewed,
    TakenBack,
    VersionAnnounced,
)

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

# ---- nodes ----


def attached(first: pb.NodeReport, stream: int) -> Attached:
    """Return the core's event for the hello of a node. Raises ConfigError."""
    node = checked_name(first.node, "the node's name")
    return read(Attached, first.hello, node=node, stream=stream)


_REPORTS: Final[dict[str, type[Event]]] = {
    "revocation": TakenBack,
    "released": ReplicaDrained,
    "activation": Activated,
    "obeyed": Obeyed,
}


def event_of(report: pb.NodeReport, stream: int) -> Event | None:
    """Return the core's event for a node's report. Raises ConfigError.

    None for a repeated hello, or a kind of report of a newer protocol.
    """
    match report.WhichOneof("report"):
        case "offers":
            return _offered(report, stream)
        case "telemetry":
            return _measured(report.telemetry, stream)
        case str() as field if field in _REPORTS:
            return read(_REPORTS[field], getattr(report, field), stream=stream)
        case _:
            return None


def _offered(report: pb.NodeReport, stream: int) -> Offered:
    check_number(report.offers.offers, MAX_REPLICAS, f"offers of node {report.node}")
    offers, refused, held = [], [], []
    for message in report.offers.offers:
        try:
            offers.append(offer_of(message, report.node))
            if message.HasField("held"):
                held.append(read(Held, message.held, replica=message.replica))
        except (ValueError, ConfigError) as error:
            refused.append(cut_text(str(error)))
    return Offered(stream, tuple(offers), tuple(refused), tuple(held))


def offer_of(message: pb.Offer, node: str) -> Offer:
    """Return one offer of a node from its message. Raises ValueError or `ConfigError`.

    Its time to live is 10 s at most.
    """
    replica = checked_name(message.replica, "a replica's name")
    if message.kind not in KIND_OF:
        raise ValueError(f"the offer of {replica} has no kind; send GUEST or DEDICATED")
    if not math.isfinite(message.ttl_s):
        raise ValueError(f"ttl_s of {replica} is {message.ttl_s}; offer for some seconds")
    return read(
        Offer,
        message,
        node=node,
        kind=KIND_OF[message.kind],
        url=checked_url(message.url, f"the url of {replica}"),
        ttl_s=min(MAX_OFFER_TTL_S, message.ttl_s),
        job=message.job and checked_name(message.job, f"the job of {replica}"),
        model=message.model and checked_name(message.model, f"the model of {replica}"),
        models=_models(message.models, replica),
        near=_models(message.near, replica),
    )


def _models(names: Iterable[str], replica: str) -> tuple[str, ...]:
    models = tuple(checked_name(name, f"a model of {replica}") for name in names)
    check_number(models, MAX_MODELS, f"models of {replica}")
    return models


def _measured(telemetry: pb.Telemetry, stream: int) -> RatesMeasured:
    """Return the event of a node's telemetry, with texts cut and figures checked."""
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


# ---- gateways, trainers and operators ----


def demanded(report: pb.DemandReport) -> Demanded:
    """Return the core's event for a gateway's demand report. Raises ConfigError."""
    gateway = checked_name(report.gateway, "DemandReport.gateway")
    check_number(report.jobs, MAX_JOBS, f"jobs of gateway {gateway}")
    check_number(report.switches, MAX_SWITCHES, f"switches of gateway {gateway}")
    return Demanded(
        gateway,
        tuple(read(JobFigures, each) for each in report.jobs),
        tuple(read(Switched, each) for each in report.switches),
    )


def _harvest_set(request: pb.SetHarvestRequest) -> HarvestSet:
    if request.mode not in MODE_OF:
        raise ConfigError(f"harvest mode {request.mode} is unknown; send OFF, HOLD, …, ACTIVE")
    replica = request.replica and checked_name(request.replica, "SetHarvest.replica")
    return HarvestSet(MODE_OF[request.mode], replica or None, opens=not request.stop_alone)


def policy_applied(request: pb.ApplyPolicyRequest) -> PolicyApplied:
    """Return the core's event for an operator's policy. Raises ConfigError with the path."""
    try:
        return PolicyApplied(parse_policy(request.policy))
    except PolicyError as error:
        raise ConfigError(str(error)) from None


_REQUESTS: Final[dict[type[Message], Callable[[Any], Event]]] = {
    pb.DemandReport: demanded,
    pb.RegisterJobRequest: partial(read, JobRegistered),
    pb.AnnounceVersionRequest: partial(read, VersionAnnounced),
    pb.EndJobRequest: partial(read, JobEnded),
    pb.DropJobRequest: partial(read, JobDropped),
    pb.RenewRunRequest: partial(read, RunRenewed),
    pb.EndRunRequest: partial(read, RunEnded),
    pb.RevokeRequest: partial(read, RevokeAsked),
    pb.SetHarvestRequest: _harvest_set,
    pb.ApplyPolicyRequest: policy_applied,
    pb.DeletePolicyRequest: partial(read, PolicyDeleted),
}


def asked(request: Message) -> Event:
    """Return the core's event for a request of a gateway, trainer or operator. Raises
    ConfigError.
    """
    return _REQUESTS[type(request)](request)


# ---- to nodes ----


def lease_command(lease: Lease, ttl_s: float, model: str = "", version: int = 0) -> pb.NodeCommand:
    """Return the command that grants or renews a lease, with its job's model and newest version."""
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
    """Return the command to a node to drain a leased replica."""
    return pb.NodeCommand(
        release=pb.Release(replica=lease.replica, epoch=lease.epoch, reason=reason)
    )


def harvest_command(mode: HarvestMode, replica: str = "") -> pb.NodeCommand:
    """Return the command that sets the lending mode of a replica, or of the whole node ("")."""
    return pb.NodeCommand(harvest=pb.Harvest(mode=MODE_TO[mode], replica=replica))

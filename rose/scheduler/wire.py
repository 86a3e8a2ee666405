"""Between protobuf messages and the core's own types."""

from elastic_scheduler import HarvestMode, Lease, Offer, ReplicaKind
from rose.errors import ConfigError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.demand import JobFigures, Switched
from rose.scheduler.messages import (
    Activated,
    Demanded,
    Drained,
    Event,
    Measured,
    Offered,
    TakenBack,
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


def mode_of(number: "pb.HarvestMode.ValueType") -> HarvestMode:
    """The mode of a request. Raises `ConfigError` for an unspecified or unknown one."""
    if number not in MODE_OF:
        raise ConfigError(f"harvest mode {number} is unknown; send OFF, HOLD, …, ACTIVE")
    return MODE_OF[number]


def event_of(report: pb.NodeReport, stream: int) -> Event | None:
    """What a report means to the core; None for a repeated hello or a kind of a newer protocol."""
    match report.WhichOneof("report"):
        case "offers":
            return _offered(report, stream)
        case "telemetry":
            return Measured(stream, report.telemetry)
        case "revocation":
            taken = report.revocation
            return TakenBack(stream, taken.replica, taken.epoch, taken.reason)
        case "released":
            drained = report.released
            return Drained(stream, drained.replica, drained.epoch, drained.aborted)
        case "activation":
            done = report.activation
            return Activated(stream, done.replica, done.version, done.ok, done.message)
        case _:
            return None


def _offered(report: pb.NodeReport, stream: int) -> Offered:
    offers, refused = [], []
    for message in report.offers.offers:
        try:
            offers.append(offer_of(message, report.node))
        except ValueError as error:
            refused.append(str(error))
    return Offered(stream, tuple(offers), tuple(refused))


def offer_of(message: pb.Offer, node: str) -> Offer:
    """One offer. Raises ValueError for what no replica can mean."""
    if message.kind not in KIND_OF:
        raise ValueError(f"the offer of {message.replica} has no kind; send GUEST or DEDICATED")
    return Offer(
        replica=message.replica,
        kind=KIND_OF[message.kind],
        url=message.url,
        node=node,
        kv_tokens=message.kv_tokens,
        decode_tok_s=message.decode_tok_s,
        prefill_tok_s=message.prefill_tok_s,
        policy_version=message.policy_version,
        healthy=message.healthy,
        ttl_s=min(MAX_OFFER_TTL_S, message.ttl_s),
        epoch=message.epoch,
        max_sequences=message.max_sequences,
    )


def demanded(report: pb.DemandReport) -> Demanded:
    """What a gateway reports. Raises `ConfigError` for one that does not say who it is."""
    if not report.gateway:
        raise ConfigError("a gateway needs a name; send DemandReport.gateway")
    jobs = (
        JobFigures(each.job, each.turns, each.owed_tokens, each.made_tok_s) for each in report.jobs
    )
    switches = (Switched(each.replica, each.epoch, each.took_s) for each in report.switches)
    return Demanded(report.gateway, tuple(jobs), tuple(switches))


def lease_command(lease: Lease, ttl_s: float) -> pb.NodeCommand:
    """Grant or renewal."""
    return pb.NodeCommand(
        lease=pb.Lease(
            id=lease.id, job=lease.job, replica=lease.replica, epoch=lease.epoch, ttl_s=ttl_s
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

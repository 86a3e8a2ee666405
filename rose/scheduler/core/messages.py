"""Messages of the scheduler's core: its events and actions.

Events of peers have the fields of their messages in `rose.proto`, of types that say what each may
hold; `rose.scheduler.wire` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_scheduler import HarvestMode, Offer
from elastic_scheduler.capacity import CapacityPolicy
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import JobFigures, Switched
from rose.scheduler.core.limits import (
    Figure,
    Labels,
    Name,
    OptionalName,
    OptionalUrl,
    SourceUrl,
    Text,
    Version,
    Weight,
)
from rose.scheduler.core.runs import Claim
from rose.store.protocol import Write

# ---- events ----


@dataclass(frozen=True, slots=True)
class Attached:
    """Event for the scheduler core: a node attached, on a stream with a number unique here.

    takes_caps: the node obeys caps of policies. takes_renewals: one command may renew several of
    its leases. release: the node's ROSE version. obeys: the node confirms each new order of modes.
    """

    node: Name
    stream: int
    cluster: OptionalName = ""
    relay_url: OptionalUrl = ""
    labels: Labels = field(default_factory=dict)
    takes_caps: bool = False
    takes_renewals: bool = False
    release: Text = ""
    obeys: bool = False


@dataclass(frozen=True, slots=True)
class Obeyed:
    """Event for the scheduler core: a node confirmed that the modes sent as `order` hold on it."""

    stream: int
    order: int


@dataclass(frozen=True, slots=True)
class Detached:
    """Event for the scheduler core: a node's stream ended, whichever side closed it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Held:
    """Lease that a node reports as live: the replica, its job, and `left_s` until it expires."""

    replica: Name
    job: Name
    epoch: int
    left_s: Figure


@dataclass(frozen=True, slots=True)
class Offered:
    """Event for the scheduler core: all offers of a node, which replace its earlier ones.

    held: leases that the node still holds, for a new leader to adopt.
    """

    stream: int
    offers: tuple[Offer, ...]
    refused: tuple[str, ...] = ()  # why malformed offers were dropped
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class RatesMeasured:
    """Event for the scheduler core: a node's telemetry, which replaces its earlier telemetry."""

    stream: int
    telemetry: pb.Telemetry


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Event for the scheduler core: the node revoked the replica's lease of `epoch`."""

    stream: int
    replica: Name
    epoch: int
    reason: Text


@dataclass(frozen=True, slots=True)
class ReplicaDrained:
    """Event for the scheduler core: the node drained the replica and ended the lease of `epoch`.

    aborted: number of turns that were cut off.
    """

    stream: int
    replica: Name
    epoch: int
    aborted: int


@dataclass(frozen=True, slots=True)
class Activated:
    """Event for the scheduler core: a replica's switch to weights `version` of `job` ended.

    ok: the replica runs the version now; else `message` has the reason. job: "" means the only job.
    """

    stream: int
    replica: Name
    version: Version
    ok: bool
    message: Text
    job: OptionalName = ""


@dataclass(frozen=True, slots=True)
class Demanded:
    """Event for the scheduler core: a gateway's report of its jobs' turns and owed tokens.

    The report replaces the gateway's earlier one. switches: first tokens seen under new leases.
    """

    gateway: str
    jobs: tuple[JobFigures, ...]
    switches: tuple[Switched, ...] = ()


@dataclass(frozen=True, slots=True)
class JobRegistered:
    """Event for the scheduler core: a trainer registers its job, or changes the job's limits.

    The caller gets the greatest version number that the job ever used. claim: the trainer's run,
    None for a trainer that names none. take_over: take the job from a run that still has it.
    """

    job: Name
    max_staleness: int
    model: OptionalName = ""
    weight: Weight = 1.0
    max_guests: int = 0
    claim: Claim | None = None
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Event for the scheduler core: a trainer or an operator ends a job.

    The caller gets the number of leases that are being released. claim: run of the trainer that
    ends the job, None for an operator.
    """

    job: Name
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class VersionAnnounced:
    """Event for the scheduler core: a trainer published a weight version at `url`.

    The caller gets the number of nodes that are sent the version, 0 if it was known already.
    parent: version that the weights are a delta to; equal to `version` for a base that replaces the
    job's chain. claim: the trainer's run.
    """

    job: Name
    version: Version
    parent: Version
    url: SourceUrl
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class RunRenewed:
    """Event for the scheduler core: a trainer renews its run's hold on a job.

    The caller gets the greatest version number that the job ever used.
    """

    job: Name
    claim: Claim


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Event for the scheduler core: a trainer's run ended in order and gives up its job.

    The next run need not wait for a timeout. The caller gets 0.
    """

    job: Name
    claim: Claim


@dataclass(frozen=True, slots=True)
class JobDropped:
    """Event for the scheduler core: an operator ends a job and deletes its version records.

    The caller gets the number of deleted versions. force: drop the job even while its run lives.
    """

    job: Name
    force: bool = False


@dataclass(frozen=True, slots=True)
class HarvestSet:
    """Event for the scheduler core: an operator set the lending mode of a replica, or of all
    (None).

    The caller gets the number of leases that are being released. opens: if no policy is in force, a
    mode other than OFF also puts the policy `cli` in force, which lets everything be lent.
    """

    mode: HarvestMode
    replica: str | None
    opens: bool = True


@dataclass(frozen=True, slots=True)
class PolicyApplied:
    """Event for the scheduler core: a capacity policy is put in force, or replaced by name.

    The caller gets 1 if that changed anything, else 0. of_object: the policy is a Kubernetes
    object, which alone may change it from then on.
    """

    policy: CapacityPolicy
    of_object: bool = False


@dataclass(frozen=True, slots=True)
class PolicyDeleted:
    """Event for the scheduler core: a capacity policy is taken out of force.

    The caller gets 1. of_object: the policy's Kubernetes object was deleted.
    """

    name: Name
    of_object: bool = False


@dataclass(frozen=True, slots=True)
class ObjectsHeard:
    """Event for the scheduler core: the policies of Kubernetes objects match the API server's
    state.

    heard_s: monotonic time of that state. refused: names of objects whose present content is
    invalid. labels: those of each Kubernetes node that policies go by, by the node's name.
    """

    heard_s: float
    refused: frozenset[str] = frozenset()
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuotasHeard:
    """Event for the scheduler core: running placeholder pods by job, as of monotonic `heard_s`."""

    heard_s: float
    pods: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RevokeAsked:
    """Event for the scheduler core: an operator revokes a replica's lease.

    The caller gets the epoch of the lease.
    """

    replica: Name
    reason: Text


@dataclass(frozen=True, slots=True)
class EpochReserved:
    """Event for the scheduler core: a replica's next lease epoch is durable in the store.

    A lease may be granted under it, and no later process uses it again.
    """

    replica: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Event for the scheduler core: time passed. wall_s: Unix seconds, None if unknown."""

    wall_s: float | None = None


# Events that change the store: `SchedulerCore.writes` returns their writes, and once these are
# durable the event is carried out.
StoredEvent = (
    JobRegistered
    | JobEnded
    | JobDropped
    | RunEnded
    | VersionAnnounced
    | HarvestSet
    | PolicyApplied
    | PolicyDeleted
)


Event = (
    Attached
    | Obeyed
    | Detached
    | Offered
    | RatesMeasured
    | TakenBack
    | ReplicaDrained
    | Activated
    | Demanded
    | JobRegistered
    | JobEnded
    | JobDropped
    | RunRenewed
    | RunEnded
    | VersionAnnounced
    | HarvestSet
    | PolicyApplied
    | PolicyDeleted
    | ObjectsHeard
    | QuotasHeard
    | RevokeAsked
    | EpochReserved
    | Tick
)

# ---- actions, carried out in order ----


@dataclass(frozen=True, slots=True)
class Reserve:
    """Action of the scheduler core: store a lease epoch, then feed the event `then` to the core.

    No other action waits for the write.
    """

    write: Write
    then: EpochReserved


@dataclass(frozen=True, slots=True)
class Save:
    """Action of the scheduler core: store a value in the background; nothing waits for it."""

    write: Write


@dataclass(frozen=True, slots=True)
class Command:
    """Action of the scheduler core: send a command to the node attached on a stream."""

    stream: int
    command: pb.NodeCommand


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Action of the scheduler core: close a node's stream, with the reason for its log."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class PublishTable:
    """Action of the scheduler core: send the replica table to all gateways that watch it."""

    table: pb.ReplicaTable


@dataclass(frozen=True, slots=True)
class LogRecord:
    """Action of the scheduler core: append a record to the event log.

    figures: numbers behind the decision, which go to the audit log.
    """

    event: str
    fields: dict[str, object] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Action of the scheduler core: return this number to the RPC caller behind the event."""

    value: int


Action = Reserve | Save | Command | CloseStream | PublishTable | LogRecord | Answer

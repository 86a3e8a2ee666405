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
    Text,
    Url,
    Version,
    Weight,
)
from rose.scheduler.core.runs import Claim
from rose.store.protocol import Write

# ---- events ----


@dataclass(frozen=True, slots=True)
class Attached:
    """A node opened a stream; `stream` is unique within this process.

    takes_renewals: its leases may be renewed in one command. release: of ROSE. obeys: it says when
    a mode holds.
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
    """The modes that the node was told with this order hold on it."""

    stream: int
    order: int


@dataclass(frozen=True, slots=True)
class Detached:
    """A stream is over, whoever ended it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Held:
    """A lease that lives at a node for `left_s` more."""

    replica: Name
    job: Name
    epoch: int
    left_s: Figure


@dataclass(frozen=True, slots=True)
class Offered:
    """Offers of a node, all of them; earlier offers of it are void."""

    stream: int
    offers: tuple[Offer, ...]
    refused: tuple[str, ...] = ()  # why malformed offers were dropped
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class RatesMeasured:
    """Telemetry of a node, replacing what it said before."""

    stream: int
    telemetry: pb.Telemetry


@dataclass(frozen=True, slots=True)
class TakenBack:
    """The node revoked the lease of `epoch`."""

    stream: int
    replica: Name
    epoch: int
    reason: Text


@dataclass(frozen=True, slots=True)
class ReplicaDrained:
    """The node carried out a release of `epoch`."""

    stream: int
    replica: Name
    epoch: int
    aborted: int


@dataclass(frozen=True, slots=True)
class Activated:
    """A replica now runs `version` of `job`, or failed to; without a job, that of the only one."""

    stream: int
    replica: Name
    version: Version
    ok: bool
    message: Text
    job: OptionalName = ""


@dataclass(frozen=True, slots=True)
class Demanded:
    """Replace a gateway's report of what its turns need."""

    gateway: str
    jobs: tuple[JobFigures, ...]
    switches: tuple[Switched, ...] = ()


@dataclass(frozen=True, slots=True)
class JobRegistered:
    """Register a trainer's job. Answered with the newest version.

    claim: its run, None for a trainer that names none. take_over: though another run has the job.
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
    """End a job. Answered with leases released.

    claim: of the trainer that says so, None for an operator.
    """

    job: Name
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class VersionAnnounced:
    """Announce a trainer's version. Answered with the number of nodes told.

    parent: the version itself for a base that replaces the job's chain. claim: the trainer's run.
    """

    job: Name
    version: Version
    parent: Version
    url: Url
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class RunRenewed:
    """Renew a trainer's run. Answered with the newest version of its job."""

    job: Name
    claim: Claim


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A trainer ends in order: the next one need not wait. Answered with 0."""

    job: Name
    claim: Claim


@dataclass(frozen=True, slots=True)
class JobDropped:
    """An operator wants a job forgotten, though its run lives (force). Answered with versions."""

    job: Name
    force: bool = False


@dataclass(frozen=True, slots=True)
class HarvestSet:
    """An operator set the mode of a replica, or of all (None). Answered with leases released.

    opens: where no policy is in force, a mode above OFF lets all be lent.
    """

    mode: HarvestMode
    replica: str | None
    opens: bool = True


@dataclass(frozen=True, slots=True)
class PolicyApplied:
    """An operator put a capacity policy in force. Answered with 1 when that changed anything.

    of_object: by an object of Kubernetes, which alone changes it from then on.
    """

    policy: CapacityPolicy
    of_object: bool = False


@dataclass(frozen=True, slots=True)
class PolicyDeleted:
    """An operator took a capacity policy out of force. Answered with 1.

    of_object: the object that it came from is there no more.
    """

    name: Name
    of_object: bool = False


@dataclass(frozen=True, slots=True)
class ObjectsHeard:
    """Policies of objects are in force as the API server had them at `heard_s`.

    refused: names of objects that cannot be taken as they are now.
    """

    heard_s: float
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RevokeAsked:
    """End a lease at an operator's request. Answered with its epoch."""

    replica: Name
    reason: Text


@dataclass(frozen=True, slots=True)
class EpochReserved:
    """A lease's epoch is durable: whatever happens to this process, it is never used again."""

    replica: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. wall_s: Unix seconds, None where nobody looked at that clock."""

    wall_s: float | None = None


# Events that change what is stored: `SchedulerCore.writes` says how, and once that is durable the
# event is carried out.
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
    | RevokeAsked
    | EpochReserved
    | Tick
)

# ---- actions, carried out in order ----


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make an epoch durable, then say so; nothing else waits for it."""

    write: Write
    then: EpochReserved


@dataclass(frozen=True, slots=True)
class Save:
    """Make a value durable; nothing waits for it, and it is true whether that succeeds or not."""

    write: Write


@dataclass(frozen=True, slots=True)
class Command:
    """Send to the node behind a stream."""

    stream: int
    command: pb.NodeCommand


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End a node's stream."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class PublishTable:
    """Give all watchers this table."""

    table: pb.ReplicaTable


@dataclass(frozen=True, slots=True)
class LogRecord:
    """Append to the event log; figures: what decided it, for the audit log besides."""

    event: str
    fields: dict[str, object] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The number that the caller of an RPC gets."""

    value: int


Action = Reserve | Save | Command | CloseStream | PublishTable | LogRecord | Answer

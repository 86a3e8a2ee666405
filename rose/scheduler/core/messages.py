"""Messages of the scheduler's core: its events and actions, and bounded queues to the streams."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from elastic_scheduler import HarvestMode, Offer
from elastic_scheduler.capacity import CapacityPolicy
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import JobFigures, Switched
from rose.scheduler.core.runs import Claim

# Far more than a version chain: a node this far behind attaches anew and gets all of it again.
COMMAND_LIMIT = 4_096


class CommandQueue:
    """Commands for one node, in order. Nothing is ever dropped: a full queue ends the stream."""

    def __init__(self, limit: int = COMMAND_LIMIT) -> None:
        self._queue: asyncio.Queue[pb.NodeCommand | None] = asyncio.Queue(limit + 1)
        self._limit = limit
        self.closed: str | None = None
        self.code = grpc.StatusCode.ABORTED

    def put(self, command: pb.NodeCommand) -> None:
        """Add a command; closes the queue when the node does not keep up."""
        if self.closed is None and self._queue.qsize() >= self._limit:
            self.close("the node does not take its commands; attach anew")
        elif self.closed is None:
            self._queue.put_nowait(command)

    def close(self, reason: str, code: grpc.StatusCode = grpc.StatusCode.ABORTED) -> None:
        """Let `get` return None once all commands before are taken."""
        if self.closed is None:
            self.closed, self.code = reason, code
            self._queue.put_nowait(None)

    @property
    def waiting(self) -> int:
        """Commands that the node has not taken yet."""
        return self._queue.qsize()

    async def get(self) -> pb.NodeCommand | None:
        """The next command, None when the stream shall end."""
        return await self._queue.get()


class TableSlot:
    """The newest table for one watcher; older ones that it did not take are gone."""

    def __init__(self) -> None:
        self._table: pb.ReplicaTable | None = None
        self._fresh = asyncio.Event()

    def put(self, table: pb.ReplicaTable | None) -> None:
        """Replace whatever waits; None ends the watch."""
        self._table = table
        self._fresh.set()

    async def get(self) -> pb.ReplicaTable | None:
        """The newest table, once there is one that was not taken yet; None at the end."""
        await self._fresh.wait()
        self._fresh.clear()
        return self._table


# ---- events ----


@dataclass(frozen=True, slots=True)
class Attached:
    """A node opened a stream; `stream` is unique within this process.

    takes_renewals: its leases may be renewed in one command. release: of ROSE. obeys: it says when
    a mode holds.
    """

    node: str
    stream: int
    cluster: str = ""
    relay_url: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    takes_caps: bool = False
    takes_renewals: bool = False
    release: str = ""
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

    replica: str
    job: str
    epoch: int
    left_s: float


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
    replica: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaDrained:
    """The node carried out a release of `epoch`."""

    stream: int
    replica: str
    epoch: int
    aborted: int


@dataclass(frozen=True, slots=True)
class Activated:
    """A replica now runs `version` of `job`, or failed to; without a job, that of the only one."""

    stream: int
    replica: str
    version: int
    ok: bool
    message: str
    job: str = ""


@dataclass(frozen=True, slots=True)
class Demanded:
    """A gateway said what its turns need; what it said before is void."""

    gateway: str
    jobs: tuple[JobFigures, ...]
    switches: tuple[Switched, ...] = ()


@dataclass(frozen=True, slots=True)
class JobRegistered:
    """A trainer asks for capacity. Answered with the newest version.

    claim: its run, None for a trainer that names none. take_over: though another run has the job.
    """

    job: str
    max_staleness: int
    model: str = ""
    weight: float = 1.0
    max_guests: int = 0
    claim: Claim | None = None
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job needs nothing any more. Answered with leases released.

    claim: of the trainer that says so, None for an operator.
    """

    job: str
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class VersionAnnounced:
    """A trainer published a version. Answered with the number of nodes told.

    parent: the version itself for a base that replaces the job's chain. claim: the trainer's run.
    """

    job: str
    version: int
    parent: int
    url: str
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class RunRenewed:
    """A trainer lives. Answered with the newest version of its job."""

    job: str
    claim: Claim


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A trainer ends in order: the next one need not wait. Answered with 0."""

    job: str
    claim: Claim


@dataclass(frozen=True, slots=True)
class JobDropped:
    """An operator wants a job forgotten, though its run lives (force). Answered with versions."""

    job: str
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

    name: str
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
    """An operator ends a lease. Answered with its epoch."""

    replica: str
    reason: str


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
class StoreWrite:
    """A value for the store; None deletes the key."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make an epoch durable, then say so; nothing else waits for it."""

    write: StoreWrite
    then: EpochReserved


@dataclass(frozen=True, slots=True)
class Save:
    """Make a value durable; nothing waits for it, and it is true whether that succeeds or not."""

    write: StoreWrite


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

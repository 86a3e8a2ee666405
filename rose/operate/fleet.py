"""Read model of a fleet: what every verb of `rose` shows, from one snapshot of the scheduler.

    SnapshotReply ──► Fleet: nodes with their hosts and capacity, replicas with leases and engines,
                             jobs with their runs

Names and units of its fields are those of `-o json`, and part of what scripts rely on: fields are
added, and never change their meaning. An unknown figure is None, never 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from executor.freeze_reason import explained
from rose.rpc import rose_pb2 as pb
from rose.rpc.reading import read

# A node reports twice a second; the scheduler counts its relay as gone after this.
SILENT_S: Final = 3.0
DEDICATED: Final = "dedicated"
# A node tells no reason for these; its log has it.
_UNSTARTED = {
    "backoff": "its engine ended or did not start: the node's log says why",
    "failed": "its engine was given up: the node's log says why",
}


class Mode(StrEnum):
    """Mode of lending of a fleet, a node or a replica, in operators' words."""

    UNKNOWN = "unknown"
    OFF = "off"
    DRAIN = "drain"
    HOLD = "hold"
    ACTIVE = "active"


class NodeState(StrEnum):
    """State of a node. SILENT: attached, without a message for 3 s. AWAY: known, not attached."""

    ATTACHED = "attached"
    SILENT = "silent"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class HostRow:
    """Serving engine of a node, with latencies, load and targets; name: "" for the only one.

    source: `plugin`, or `scrape`, whose figures are some seconds old. Figures are None if unknown.
    """

    name: str
    source: str
    running: int
    waiting: int
    busy_share: float | None
    kv_share: float | None
    ttft_p95_s: float
    ttft_target_s: float
    tpot_p95_s: float
    tpot_target_s: float
    window_requests: int
    window_s: float

    @property
    def strain(self) -> float:
        """Largest ratio of a latency's p95 to its target; above 1 a target is missed."""
        pairs = (
            (self.ttft_p95_s, self.ttft_target_s),
            (self.tpot_p95_s, self.tpot_target_s),
        )
        return max((at_s / target_s for at_s, target_s in pairs if target_s > 0), default=0.0)


@dataclass(frozen=True, slots=True)
class PolicyField:
    """Field of a node's effective policy: path, value, and the policy that set it."""

    path: str
    value: str
    policy: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity that policies leave a node. mode: in force. would: mode that mode Active would give.

    limits: reasons why no more is lent. lend_bytes, lend_compute: what the node lends, or would
    lend, now; advised_*: averages of these over `advised_s`. None means unknown.
    """

    policy_mode: str
    mode: Mode
    would: Mode
    limits: tuple[str, ...]
    policies: tuple[str, ...]
    busy_share: float | None
    kv_share: float | None
    lend_bytes: int | None
    lend_compute: float | None
    advised_s: float
    advised_bytes: float | None
    advised_compute: float | None
    fields: tuple[PolicyField, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Machine of the fleet. confirms: it confirms new modes; confirmed_s: how long that took.

    heard_s: seconds since its last message, None if unknown. release: its ROSE version.
    """

    name: str
    state: NodeState
    heard_s: float | None
    release: str
    cluster: str
    confirms: bool
    confirmed_s: float | None
    hosts: tuple[HostRow, ...]
    capacity: Capacity | None
    replicas: tuple[str, ...]

    @property
    def strain(self) -> float:
        """Largest latency-to-target ratio of the node's hosts."""
        return max((host.strain for host in self.hosts), default=0.0)


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """Lease of a replica to a job. why: reason of the last decision about it."""

    job: str
    epoch: int
    state: str
    expires_in_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Engine:
    """State of a replica's engine. grant: its permission to run, `none` without a gate.

    reason: word of `FreezeReason` that says why it may or may not run; why: the same as a sentence.
    held_bytes: all memory that it holds, measured while it must not exist, else None. late: why it
    has not the newest version of its job, as last tried; empty while it has. kv_kept: why its KV
    memory stays until it ends; empty if it can give it back.
    """

    state: str
    restarts: int
    grant: str
    reason: str
    why: str
    duty: float
    running: int
    waiting: int
    tokens_total: int
    kv_bytes: int
    lend_bytes: int | None
    held_bytes: int | None
    late: str = ""
    kv_kept: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """Guest or dedicated replica. held_job: job of its weights, "" if that is the lease's job.

    mode: the replica's own mode, None if an operator set none.
    """

    name: str
    kind: str
    node: str
    url: str
    healthy: bool
    job: str
    version: int
    held_job: str
    model: str
    mode: Mode | None
    lease: LeaseRow | None
    engine: Engine | None

    @property
    def is_guest(self) -> bool:
        """True unless the replica is dedicated, so that a stop of lending ends it."""
        return self.kind != DEDICATED


@dataclass(frozen=True, slots=True)
class RunRow:
    """Trainer's run of a job, as last known. state: live, silent or ended."""

    run: str
    holder: str
    since_unix_s: float
    silent_s: float
    state: str


@dataclass(frozen=True, slots=True)
class Job:
    """Registered job. turns, owed_tokens, made_tok_s: None while no gateway has reported.

    version: its newest weight version. chain: number of versions of which nodes are told. quota:
    guests that its placeholder pods allow. held_back: why its quota admits no new guest.
    """

    name: str
    model: str
    version: int
    max_staleness: int
    weight: float
    max_guests: int | None
    quota: int | None
    held_back: str
    leased: int
    guests: int
    turns: int | None
    owed_tokens: float | None
    made_tok_s: float | None
    standing: bool
    chain: int
    first_version: int
    base: bool
    run: RunRow | None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that a scheduler's snapshot says. overrides: modes of single replicas."""

    release: str
    harvest: Mode
    overrides: Mapping[str, Mode]
    troubles: tuple[str, ...]
    store_stalled_s: float
    nodes: tuple[NodeStatus, ...]
    replicas: tuple[ReplicaRow, ...]
    jobs: tuple[Job, ...]

    def node(self, name: str) -> NodeStatus | None:
        """Return the node of that name, None if it is unknown."""
        return next((node for node in self.nodes if node.name == name), None)

    def by_node(self) -> dict[str, list[ReplicaRow]]:
        """Return the replicas by node name; a node without replicas has an empty list."""
        found: dict[str, list[ReplicaRow]] = {node.name: [] for node in self.nodes}
        for replica in self.replicas:
            found.setdefault(replica.node, []).append(replica)
        return found

    @property
    def skewed(self) -> list[NodeStatus]:
        """Attached nodes that run another ROSE release than the scheduler."""
        return [
            node
            for node in self.nodes
            if node.state is not NodeState.AWAY
            and self.release
            and node.release != self.release
            and (node.release or not node.confirms)
        ]


_KINDS: Final = {pb.REPLICA_KIND_GUEST: "guest", pb.REPLICA_KIND_DEDICATED: DEDICATED}
_MODES: Final = {
    pb.HARVEST_MODE_OFF: Mode.OFF,
    pb.HARVEST_MODE_HOLD: Mode.HOLD,
    pb.HARVEST_MODE_HOLD_AND_DRAIN: Mode.DRAIN,
    pb.HARVEST_MODE_ACTIVE: Mode.ACTIVE,
}
WIRE_MODES: Final = {mode: number for number, mode in _MODES.items()}


def mode_of(number: "pb.HarvestMode.ValueType") -> Mode:
    """Return the operators' word for a mode of the protocol, UNKNOWN for a newer one."""
    return _MODES.get(number, Mode.UNKNOWN)


def fleet_of(snapshot: pb.SnapshotReply) -> Fleet:
    """Return the fleet in a snapshot, also in one of an older scheduler, which lists no nodes."""
    leases = {lease.replica: lease for lease in snapshot.leases}
    engines = {guest.replica: guest for guest in snapshot.guests}
    modes = {each.replica: mode_of(each.mode) for each in snapshot.overrides}
    nodes = _nodes(snapshot)
    node_of = {replica: node.name for node in nodes for replica in node.replicas}
    offered = {row.id: row for row in snapshot.replicas}
    replicas = [
        _replica(
            offered.get(name) or pb.Replica(id=name, node=node_of.get(name, "")),
            leases.get(name),
            engines.get(name),
            modes.get(name),
        )
        for name in sorted(offered.keys() | engines.keys())
    ]
    return Fleet(
        release=snapshot.release,
        harvest=mode_of(snapshot.harvest),
        overrides=modes,
        troubles=tuple(snapshot.troubles),
        store_stalled_s=snapshot.store_stalled_s,
        nodes=tuple(nodes),
        replicas=tuple(replicas),
        jobs=tuple(map(_job, snapshot.jobs)),
    )


def _nodes(snapshot: pb.SnapshotReply) -> list[NodeStatus]:
    hosts: dict[str, list[HostRow]] = {}
    for host in snapshot.hosts:
        hosts.setdefault(host.node, []).append(_host(host))
    capacity = {row.node: capacity_of(row) for row in snapshot.capacity}
    attached = {row.node: row for row in snapshot.nodes}
    of_node: dict[str, set[str]] = {}
    for row in snapshot.replicas:
        of_node.setdefault(row.node, set()).add(row.id)
    away = {node.node: node.away_s for node in snapshot.away}
    names = attached.keys() | hosts.keys() | capacity.keys() | of_node.keys()
    found = [
        NodeStatus(name, NodeState.AWAY, away_s, "", "", False, None, (), None, ())
        for name, away_s in away.items()
        if name not in names
    ]
    for name in names:
        said = attached.get(name, pb.AttachedNode(node=name))
        heard_s = said.silent_s if name in attached else None
        silent = heard_s is not None and heard_s > SILENT_S
        found.append(
            NodeStatus(
                name,
                NodeState.SILENT if silent else NodeState.ATTACHED,
                heard_s,
                said.release,
                said.cluster,
                said.obeys,
                said.obeyed_s if said.HasField("obeyed_s") else None,
                tuple(hosts.get(name, ())),
                capacity.get(name),
                tuple(sorted(of_node.get(name, set()) | {*said.replicas})),
            )
        )
    return sorted(found, key=lambda node: node.name)


def _host(said: pb.HostTelemetry) -> HostRow:
    return read(HostRow, said, name=said.host, source=said.source or "unknown")


def capacity_of(row: pb.NodeCapacity) -> Capacity:
    """Return a node's capacity from a row of a snapshot or an explanation."""
    averaged = row.advised_s > 0
    return read(
        Capacity,
        row,
        mode=mode_of(row.mode),
        would=mode_of(row.would),
        advised_bytes=row.advised_byte_s / row.advised_s if averaged else None,
        advised_compute=row.advised_compute_s / row.advised_s if averaged else None,
        fields=tuple(read(PolicyField, each) for each in row.fields),
    )


def _replica(
    row: pb.Replica,
    lease: pb.LeaseView | None,
    engine: pb.GuestTelemetry | None,
    mode: Mode | None,
) -> ReplicaRow:
    foreign = bool(row.held_job and row.job and row.held_job != row.job)
    return read(
        ReplicaRow,
        row,
        name=row.id,
        kind=_KINDS.get(row.kind, "unknown"),
        version=row.policy_version,
        held_job=row.held_job if foreign else "",
        mode=mode,
        lease=None if lease is None else read(LeaseRow, lease),
        engine=None if engine is None else _engine(engine),
    )


def _engine(said: pb.GuestTelemetry) -> Engine:
    why = explained(said.reason) if said.reason else _UNSTARTED.get(said.state, "")
    return read(Engine, said, grant=said.mode, why=why)


def _job(view: pb.JobView) -> Job:
    unknown = {} if view.demand_known else dict.fromkeys(("turns", "owed_tokens", "made_tok_s"))
    return read(
        Job,
        view,
        name=view.job,
        version=view.latest_version,
        max_guests=view.max_guests or None,
        run=_run(view.run) if view.HasField("run") else None,
        **unknown,
    )


def _run(run: pb.RunView) -> RunRow:
    state = "ended" if run.ended else "live" if run.live else "silent"
    return read(RunRow, run, since_unix_s=run.since_s, state=state)


def names(found: Iterable[NodeStatus | ReplicaRow | Job], most: int = 5) -> str:
    """Return the names as a text, `a, b, c and 7 more`, with at most `most` of them."""
    every = sorted(each.name for each in found)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more

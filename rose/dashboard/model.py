"""Read model of the dashboard: each node's state in one word, sums of the fleet, what comes first.

A model is made anew for each snapshot. Panels choose what to show of it and decide nothing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from elastic_scheduler import HarvestMode, ReplicaKind
from elastic_scheduler.capacity import LimitKind
from elastic_scheduler.capacity.budget_hold import BudgetLeft
from rose.dashboard.advisor import AdviceShown
from rose.dashboard.history import History, is_late, known_sum
from rose.dashboard.journal import JournalContent
from rose.dashboard.page import Tone
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.fleet import LAPSED_S
from rose.scheduler.core.observed import JobSeen, LeaseSeen, NodeSeen, Observed

# States of nodes, in the order in which they are worth a look, with how they are coloured.
STATES: Final[Mapping[str, Tone]] = {
    "silent": "bad",
    "away": "bad",
    "held": "warn",
    "draining": "warn",
    "lending": "good",
    "open": "good",
    "advisory": "quiet",
    "off": "quiet",
}
# Temporary limits; all others are set by an operator.
_HOLDS: Final = frozenset(
    {
        LimitKind.SLO_BUDGET,
        LimitKind.BUSY,
        LimitKind.CANARY_HALTED,
        LimitKind.SCRAPED,
        LimitKind.OLD_NODE,
    }
)
BROKEN_STATES: Final = frozenset({"backoff", "failed"})


@dataclass(frozen=True, slots=True)
class Moment:
    """Inputs of the dashboard at one moment. observed: fleet snapshot, None on a standby.

    leader: the leader's address, "" if unknown. me: this process's address. at_s: Unix seconds;
    since_s: when this process began. advised: what lending would bring. budget_left: rest of the
    SLO budget by deployment.
    """

    observed: Observed | None
    journal: JournalContent
    at_s: float
    leader: str = ""
    me: str = ""
    since_s: float = 0.0
    troubles: tuple[str, ...] = ()
    advised: AdviceShown | None = None
    budget_left: Mapping[str, BudgetLeft] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """Node of the dashboard's table, attached, or away (`seen` is None).

    state: one of `STATES`. rank: place in the table, the most urgent first. late: its host misses a
    latency target. away_s: seconds since a node that is away was heard.
    """

    name: str
    state: str
    rank: int
    late: bool = False
    seen: NodeSeen | None = None
    leases: tuple[LeaseSeen, ...] = ()
    away_s: float = 0.0

    @property
    def tone(self) -> Tone:
        return STATES[self.state]

    @property
    def host(self) -> pb.HostTelemetry | None:
        """Telemetry of the node's host, None for a node without a host."""
        if self.seen is None or not self.seen.telemetry.HasField("host"):
            return None
        return self.seen.telemetry.host

    @property
    def guests(self) -> tuple[pb.GuestTelemetry, ...]:
        """Telemetry of the node's guests, leased or not; dedicated replicas are left out."""
        if self.seen is None:
            return ()
        kinds = {offer.replica: offer.kind for offer in self.seen.offers}
        return tuple(
            each
            for each in self.seen.telemetry.guests
            if kinds.get(each.replica) is not ReplicaKind.DEDICATED
        )

    @property
    def leased_guests(self) -> tuple[pb.GuestTelemetry, ...]:
        """Telemetry of the node's leased guests."""
        leased = {each.lease.replica for each in self.leases}
        return tuple(each for each in self.guests if each.replica in leased)

    @property
    def guest_states(self) -> str:
        """Number of the node's guests in each state, as text: `2 run, 1 freeze`."""
        words = (
            each.state if each.state not in ("", "healthy") else each.mode or "idle"
            for each in self.guests
        )
        counted = sorted(Counter(words).items())
        return ", ".join(f"{number} {word}" for word, number in counted) or "none"

    def job_of(self, guest: str) -> str:
        """Return the job that leases a guest, "" without one."""
        jobs = (each.lease.job for each in self.leases if each.lease.replica == guest)
        return next(jobs, "")

    @property
    def duty(self) -> float | None:
        """Mean share of time in which the node's leased guests may compute, None without one."""
        guests = self.leased_guests
        return sum(each.duty for each in guests) / len(guests) if guests else None

    @property
    def gpus(self) -> int:
        """GPUs of the node's host, one without telemetry of them."""
        return max(1, self.host.gpus if self.host else 0)

    @property
    def working_gpus(self) -> float | None:
        """Sum of the leased guests' duty, in whole GPUs; None without one."""
        guests = self.leased_guests
        worked = sum(each.duty * max(1, each.ranks) for each in guests)
        return min(worked, self.gpus) if guests else None

    @property
    def lendable_gpus(self) -> float | None:
        """Compute that the node lends now, or would lend, in whole GPUs; None if the node does not
        report it.
        """
        compute = self.seen.advice.now.compute if self.seen else None
        return None if compute is None else compute * self.gpus

    @property
    def lent_bytes(self) -> int:
        """Bytes of KV memory that the node's leased guests have mapped."""
        return sum(each.kv_bytes for each in self.leased_guests)

    @property
    def why(self) -> str:
        """Reasons why the node lends no more, or why its guest is frozen; "" for none."""
        if self.seen is None:
            return "not attached: its host took everything back when it was cut off"
        if self.seen.verdict.limits:
            return "; ".join(map(str, self.seen.verdict.limits))
        said = [each.reason for each in self.leased_guests if each.mode != "run" and each.reason]
        return said[0] if said else ""


class Model:
    """Figures of the dashboard at one moment, from which all panels are made.

    history: read while pages are made, in the same thread.
    """

    def __init__(self, look: Moment, history: History) -> None:
        self.look = look
        self.history = history
        self.seen = look.observed or Observed()

    @cached_property
    def nodes(self) -> tuple[NodeRow, ...]:
        """All nodes, attached and away, the most urgent first, then by name."""
        by_replica = {offer.replica: node.node for node in self.seen.nodes for offer in node.offers}
        leases: dict[str, list[LeaseSeen]] = {}
        for lease in self.seen.leases:
            leases.setdefault(by_replica.get(lease.lease.replica, ""), []).append(lease)
        rows = [_row(node, tuple(leases.get(node.node, ()))) for node in self.seen.nodes]
        rows += [NodeRow(each.node, "away", 2, away_s=each.away_s) for each in self.seen.away]
        return tuple(sorted(rows, key=lambda row: (row.rank, row.name)))

    def node(self, name: str) -> NodeRow | None:
        """Return the row of the node with that name, None if it is unknown."""
        return next((row for row in self.nodes if row.name == name), None)

    @cached_property
    def states(self) -> Mapping[str, int]:
        """Number of nodes in each state, in the order of `STATES`."""
        counted = Counter(row.state for row in self.nodes)
        return {state: counted[state] for state in STATES}

    @cached_property
    def late(self) -> int:
        """Number of nodes whose host misses a latency target now."""
        return sum(row.late for row in self.nodes)

    @property
    def targets_s(self) -> tuple[float, float]:
        """TTFT and TPOT that hosts promise their users, the loosest ones; 0 without any."""
        hosts = [row.host for row in self.nodes if row.host] or [pb.HostTelemetry()]
        ttft_s, tpot_s = max((each.ttft_target_s, each.tpot_target_s) for each in hosts)
        return ttft_s, tpot_s

    @cached_property
    def lent_bytes(self) -> int:
        """Bytes of KV memory that leased guests have mapped, over all nodes."""
        return sum(row.lent_bytes for row in self.nodes)

    @cached_property
    def lendable_bytes(self) -> float | None:
        """Bytes of KV memory that nodes lend now, or would lend; None if no node reports them."""
        return known_sum(row.seen.advice.now.memory_bytes for row in self.nodes if row.seen)

    @cached_property
    def lendable_gpus(self) -> float | None:
        """Compute that nodes lend now, or would lend, in whole GPUs; None if no node reports it."""
        return known_sum(row.lendable_gpus for row in self.nodes)

    @cached_property
    def working(self) -> float | None:
        """Sum of the leased guests' duty, in whole GPUs; None without leased guests. Guests of a
        node that take turns on its GPUs have no more than these together.
        """
        return known_sum(row.working_gpus for row in self.nodes)

    @cached_property
    def advised(self) -> tuple[NodeRow, ...]:
        """Nodes that only report what they would lend, the most bytes first."""
        rows = [row for row in self.nodes if row.seen and row.seen.verdict.advises]
        return tuple(sorted(rows, key=lambda row: (-_advised_bytes(row), row.name)))

    @cached_property
    def holds(self) -> Mapping[str, int]:
        """Number of nodes by the kind of limit that holds them back; a node counts for each."""
        return dict(self.seen.held.most_common())

    @cached_property
    def leases(self) -> tuple[tuple[LeaseSeen, str, str], ...]:
        """Each lease with its node and the node's state; of silent nodes and of none first."""
        found = [
            (lease, row.name, row.state, row.rank) for row in self.nodes for lease in row.leases
        ]
        of_nobody = {each.lease.replica for each, *_ in found}
        found += [
            (lease, "", "away", 0)
            for lease in self.seen.leases
            if lease.lease.replica not in of_nobody
        ]
        found.sort(key=lambda each: (each[2] not in ("silent", "away"), each[0].lease.replica))
        return tuple((lease, node, state) for lease, node, state, _ in found)

    @cached_property
    def versions(self) -> Mapping[str, Counter[int]]:
        """Number of leased replicas by versions behind the newest, by job; -1: other weights."""
        jobs = {job.record.job: job for job in self.seen.jobs}
        found: dict[str, Counter[int]] = {name: Counter() for name in jobs}
        offers = {offer.replica: offer for node in self.seen.nodes for offer in node.offers}
        for lease in self.seen.leases:
            job, offer = jobs.get(lease.lease.job), offers.get(lease.lease.replica)
            if job is not None and offer is not None:
                found[lease.lease.job][_behind(job, offer.job, offer.policy_version)] += 1
        return found

    def beyond_bound(self, job: JobSeen) -> int:
        """Return the number of leased replicas too far behind for the job or with other weights."""
        behind, bound = self.versions[job.record.job], job.record.max_staleness
        return sum(number for lag, number in behind.items() if lag > bound or lag < 0)


def _row(node: NodeSeen, leases: tuple[LeaseSeen, ...]) -> NodeRow:
    state, late = _state(node, leases), is_late(node)
    kinds = {limit.kind for limit in node.verdict.limits}
    broken = any(each.state in BROKEN_STATES for each in node.telemetry.guests)
    if late and leases:
        rank = 0
    elif state == "silent":
        rank = 1
    elif late or broken:
        rank = 3
    elif kinds & _HOLDS:
        rank = 4
    else:
        rank = 5 + list(STATES).index(state)
    return NodeRow(node.node, state, rank, late, node, leases)


def _state(node: NodeSeen, leases: tuple[LeaseSeen, ...]) -> str:
    if node.silent_s >= LAPSED_S:
        return "silent"
    match node.mode:
        case HarvestMode.HOLD_AND_DRAIN:
            return "draining"
        case HarvestMode.HOLD:
            return "held"
        case HarvestMode.OFF:
            advises = node.verdict.advises and node.verdict.mode is HarvestMode.OFF
            return "advisory" if advises else "off"
        case HarvestMode.ACTIVE:
            kinds = {offer.replica: offer.kind for offer in node.offers}
            lends = any(kinds.get(e.lease.replica) is ReplicaKind.GUEST for e in leases)
            return "lending" if lends else "open"


def _behind(job: JobSeen, held_job: str, version: int) -> int:
    if version and held_job not in ("", job.record.job):
        return -1
    if version < job.first:
        return -1
    return max(0, job.latest - version)


def _advised_bytes(row: NodeRow) -> float:
    return row.seen.advice.byte_s if row.seen else 0.0

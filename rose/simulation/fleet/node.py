"""Stand-in for a node daemon: offers, leases, guards of its guests, and updates of its replicas.

    scheduler ── commands ──► ModelledNode ── offers, twice a second ──► scheduler
                                 │ guard, `guard_s`: Seen ──► GrantController ──► grant, on the page

The guard's core, the lease state machine and the reclaim ladder are production's. The guard of a
guest that has nothing to do ticks less often, as nothing depends on it.
"""

from collections.abc import Callable, Sequence

from elastic_scheduler import ReplicaKind
from executor.grant_controller import GrantController, GuardConfig, Observation, Reclaim, Write
from executor.kv.reclaim_ladder import (
    EngineReport,
    Escalate,
    Finished,
    GuestMeasured,
    ReclaimCore,
    ReclaimLevel,
    Unsupported,
)
from rose.node.lease import Ended, Granted, LeaseTakenBack, LeaseTick, Released, Revoked
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import (
    Activated,
    Attached,
    Event,
    Offered,
    ReplicaDrained,
    TakenBack,
)
from rose.simulation.clock.event_queue import NS, EventQueue
from rose.simulation.engine.guest import ModelledGuest
from rose.simulation.fleet.replica import ModelledReplica
from rose.simulation.fleet.weights import ModelledTransfer

REPORT_S = 0.5
GUARD_S = 0.05
IDLE_GUARD_S = 0.25
RECLAIM_S = 5.0


class ModelledGuard:
    """Guard of one guest: production's core over the modelled page."""

    def __init__(self, replica: ModelledReplica, guest: ModelledGuest, config: GuardConfig) -> None:
        self._replica = replica
        self._guest = guest
        self._core = GrantController(config)
        self._reclaim: ReclaimCore | None = None
        self._answer: EngineReport | Unsupported | None = None
        self._reclaim_cap: int | None = None
        self._ticked_ns = -NS
        self.reclaims = self.ticks = 0

    def tick(self, now_ns: int) -> None:
        """Write one grant, unless nothing can have changed since a moment ago."""
        guest = self._guest
        lease = self._replica.lease_epoch()
        busy = lease is not None and not guest.idle
        if not busy and self._reclaim is None and now_ns - self._ticked_ns < IDLE_GUARD_S * NS:
            return
        self._ticked_ns = now_ns
        self.ticks += 1
        page = guest.page
        seen = Observation(
            page.view(now_ns), guest.state(), lease_epoch=lease, reclaim_cap=self._reclaim_cap
        )
        for action in self._core.step(seen, now_ns):
            match action:
                case Write():
                    page.grant = action.grant
                    guest.granted(action.grant)
                case Reclaim() if self._reclaim is None:
                    self.reclaims += 1
                    held = guest.mapped * guest.granule_bytes
                    self._reclaim = ReclaimCore(
                        now_ns, held, action.owed_bytes, now_ns + round(RECLAIM_S * NS)
                    )
        if self._reclaim is not None:
            self._climb(self._reclaim, now_ns)

    def _climb(self, reclaim: ReclaimCore, now_ns: int) -> None:
        guest = self._guest
        held = guest.mapped * guest.granule_bytes
        answer, self._answer = self._answer, None
        for action in reclaim.step(GuestMeasured(held, answer), now_ns):
            match action:
                case Escalate(ReclaimLevel.FREEZE):
                    self._reclaim_cap = guest.mapped
                    self._answer = EngineReport(0)
                case Escalate(ReclaimLevel.BALLOON, wanted):
                    granules = -(-wanted // guest.granule_bytes)
                    guest.give_back(granules)
                    self._reclaim_cap = guest.mapped
                    freed = held - guest.mapped * guest.granule_bytes
                    self._answer = EngineReport(freed)
                case Escalate(ReclaimLevel.KILL):
                    self._replica.engine_down()
                    self._replica.engine_up()
                case Escalate():
                    guest.give_back(guest.mapped)
                    self._answer = Unsupported("not modelled")
                case Finished():
                    self._reclaim = self._reclaim_cap = None


class ModelledNode:
    """One node daemon, on `stream` of the scheduler; `say` hands it an event."""

    def __init__(
        self,
        name: str,
        stream: int,
        queue: EventQueue,
        say: Callable[[Event], None],
        transfer: ModelledTransfer,
        apply_s: float,
        *,
        far: bool,
    ) -> None:
        self.name = name
        self.stream = stream
        self.far = far
        self.replicas: dict[str, ModelledReplica] = {}
        self.guards: list[ModelledGuard] = []
        # Called when a replica has a version, with its name.
        self.on_activated: Callable[[ModelledReplica], None] | None = None
        self._queue = queue
        self._say = say
        self._transfer = transfer
        self._apply_s = apply_s
        self._newest: dict[str, int] = {}

    def start(self) -> None:
        """Attach, and begin to report."""
        self._say(Attached(self.name, self.stream, cluster="far" if self.far else "near"))
        self.report()
        # Nodes do not speak all at once.
        offset_s = 0.013 * self.stream % REPORT_S
        self._queue.every_s(REPORT_S, self.report, offset_s)
        if self.guards:
            self._queue.every_s(GUARD_S, self._guard, 0.0007 * self.stream)

    def report(self) -> None:
        """Offer everything, and let leases run out."""
        for replica in self.replicas.values():
            replica.step(LeaseTick())
        offers = tuple(each.offer() for each in self.replicas.values() if each.up)
        self._say(Offered(self.stream, offers))

    def obey(self, command: pb.NodeCommand) -> None:
        """Carry out one of the scheduler's commands."""
        match command.WhichOneof("command"):
            case "lease":
                self._leased(command.lease)
            case "renewals":
                for lease in command.renewals.leases:
                    self._leased(lease)
            case "release":
                release = command.release
                replica = self.replicas.get(release.replica)
                if replica is not None:
                    replica.step(Released(release.epoch, release.reason))
            case "version":
                self._newest[command.version.job] = command.version.version
                for replica in self.replicas.values():
                    self._update(replica)

    def revoke(self, replica: ModelledReplica, reason: str) -> None:
        """The node wants a replica's lease to end, as when its card is needed."""
        replica.step(Revoked(reason))

    def told(self, replica: ModelledReplica, word: LeaseTakenBack | Ended) -> None:
        """A replica's lease ended: the scheduler hears of it."""
        if isinstance(word, LeaseTakenBack):
            self._say(TakenBack(self.stream, replica.name, word.epoch, word.reason))
        elif word.asked:
            self._say(ReplicaDrained(self.stream, replica.name, word.epoch, word.aborted))

    def catch_up(self, replica: ModelledReplica) -> None:
        """Bring an engine that just started to the newest version."""
        self._update(replica)

    def _leased(self, lease: pb.Lease) -> None:
        replica = self.replicas.get(lease.replica)
        if replica is None:
            return
        if lease.epoch >= replica.lease.status().epoch:
            replica.job = lease.job
        replica.step(Granted(lease.epoch, lease.ttl_s))

    def _update(self, replica: ModelledReplica) -> None:
        """Fetch the job's newest version and activate it; one at a time."""
        if replica.updating or not replica.up or not self._newest:
            return
        job, version = max(self._newest.items(), key=lambda each: each[1])
        if replica.version >= version:
            return
        replica.updating = True
        held = replica.version
        takes_s = self._transfer.fetch_s(held, version, far=self.far)

        def fetched() -> None:
            if not replica.up or not replica.updating:
                return
            replica.activate(version, job, self._apply_s)
            self._queue.after_s(self._apply_s, activated)

        def activated() -> None:
            if not replica.up or not replica.updating:
                return
            replica.updating = False
            if isinstance(replica.engine, ModelledGuest):
                replica.engine.policy_version = version
            self._say(Activated(self.stream, replica.name, version, True, "", job))
            self.report()
            if self.on_activated is not None:
                self.on_activated(replica)
            self._update(replica)

        self._queue.after_s(takes_s, fetched)

    def _guard(self) -> None:
        now_ns = self._queue.now_ns
        for guard in self.guards:
            guard.tick(now_ns)


def guests_of(nodes: Sequence[ModelledNode]) -> list[ModelledReplica]:
    """All guests of these nodes."""
    return [
        replica
        for node in nodes
        for replica in node.replicas.values()
        if replica.kind is ReplicaKind.GUEST
    ]

"""Stand-in for a node daemon: its replicas' leases and updates, and guards of its guests.

    scheduler ── commands ──► ModelledNode ── offers, twice a second ──► scheduler
                                 │ each GUARD_S: Observation ──► GrantController ──► grant on page

Production's own are the lease state machine of each replica, the guard's core, the reclaim ladder,
and the choice of the objects that an update needs (`weight_transfer.catalog.Catalog`: the
chain of deltas or a base, whichever is fewer bytes). Admitting and draining an engine take no
longer here than a message does, activation takes `apply_s`. The guard of a guest that has nothing
to do ticks less often, as nothing depends on it.
"""

from collections.abc import Callable
from dataclasses import replace

from elastic_scheduler import Offer, ReplicaKind
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
from rose.node.lease import (
    Admit,
    Drain,
    Ended,
    EngineAdmitted,
    EngineDown,
    EngineDrained,
    EngineUp,
    Granted,
    LeaseStateMachine,
    LeaseTakenBack,
    LeaseTick,
    Released,
    Revoked,
)
from rose.node.lease import Event as LeaseEvent
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import (
    Activated,
    Attached,
    Event,
    Offered,
    ReplicaDrained,
    TakenBack,
)
from rose.simulation.clock import NS, EventQueue
from rose.simulation.engine.batching import ModelledEngine
from rose.simulation.engine.guest import ModelledGuest
from rose.simulation.engine_specs import StepWork
from rose.simulation.scenario import Links
from weight_transfer.catalog import Catalog, Published
from weight_transfer.errors import CatalogError

OFFER_TTL_S = 3.0
# Context of a sequence, for the offered rate at full batch.
TYPICAL_CONTEXT = 4_096
REPORT_S = 0.5
GUARD_S = 0.05
IDLE_GUARD_S = 0.25
RECLAIM_S = 5.0
KEPT_DELTAS = 8


class ModelledTransfer:
    """Model of the transfer of one job's versions to two clusters: the trainer's own, and one
    behind a slow link.

    Objects cross the slow link once, one after the other, and are passed on inside the cluster
    while they arrive.
    """

    def __init__(self, queue: EventQueue, links: Links, base_bytes: int) -> None:
        self.queue = queue
        self.links = links
        self._base_bytes = base_bytes
        self._catalog = Catalog({0: base_bytes})
        # Time at which each object has crossed the slow link: ("base" or "delta", version).
        self._crossed_s: dict[tuple[str, int], float] = {}
        self._slow_free_s = 0.0
        self.slow_bytes = 0

    def publish(self, version: int, parent: int, wire_bytes: int) -> None:
        """Add a version that its trainer has made durable; a new base replaces old deltas when one
        is due.
        """
        deltas = (*self._catalog.deltas, Published(version, parent, wire_bytes))
        self._catalog = replace(self._catalog, deltas=deltas)
        if self._catalog.base_due():
            # Older deltas are deleted; a node that is further behind takes the base.
            self._catalog = Catalog({version: self._base_bytes}, deltas[-KEPT_DELTAS:])

    def fetch_s(self, held: int | None, target: int, *, far: bool) -> float:
        """Return the seconds from now until a node that holds version `held` has `target`; None
        holds none.

        far: the node is behind the slow link.
        """
        try:
            plan = self._catalog.plan(held, target)
        except CatalogError:
            plan = self._catalog.plan(None, target)
        now_s = self.queue.now_s
        links = self.links
        near_s = now_s + plan.wire_bytes / links.near_bytes_s
        if far:
            for key, size in self._objects(plan.base, plan.deltas):
                near_s = max(near_s, self._cross(key, size, now_s))
        return near_s + links.latency_s - now_s

    def _objects(
        self, base: int | None, deltas: tuple[int, ...]
    ) -> list[tuple[tuple[str, int], int]]:
        sizes = {each.version: each.wire_bytes for each in self._catalog.deltas}
        objects = [(("delta", version), sizes[version]) for version in deltas]
        # The model that the job began with is on every node's disk.
        if base is not None and base != 0:
            objects.insert(0, (("base", base), self._catalog.bases[base]))
        return objects

    def _cross(self, key: tuple[str, int], size: int, now_s: float) -> float:
        if key not in self._crossed_s:
            began_s = max(now_s, self._slow_free_s)
            self._slow_free_s = began_s + size / self.links.slow_bytes_s
            self._crossed_s[key] = self._slow_free_s
            self.slow_bytes += size
        return self._crossed_s[key]


class ModelledReplica:
    """Replica of a modelled node. up: its engine answers from the beginning."""

    def __init__(
        self,
        node: "ModelledNode",
        name: str,
        kind: ReplicaKind,
        engine: ModelledEngine,
        *,
        up: bool,
    ) -> None:
        self.name = name
        self.node = node
        self.kind = kind
        self.engine = engine
        self.lease = LeaseStateMachine()
        self.held_job = ""
        self.version = 0
        self.updating = self.up = self.admits = False
        self._leased_s = 0.0
        self._leased_since_s: float | None = None
        self._queue = node.queue
        self._offer: Offer | None = None
        spec = engine.spec
        batch = max(1, min(spec.max_sequences, spec.kv_tokens // TYPICAL_CONTEXT))
        chunk = spec.max_step_tokens
        self._decode_tok_s = batch / spec.seconds(StepWork(0, batch, 0, batch * TYPICAL_CONTEXT))
        self._prefill_tok_s = chunk / spec.seconds(StepWork(chunk, 0, 1, 0))
        if up:
            self.engine_up()

    def engine_up(self) -> None:
        """Record that the engine answers, with the model that it started with."""
        self.up = True
        self.step(EngineUp())

    def engine_down(self) -> None:
        """Record that the engine has ended, with its turns, its KV memory and its newer weights."""
        self.up = self.admits = self.updating = False
        self.version, self.held_job = 0, ""
        self.engine.abort_all("broken")
        self.engine.kv.forget()
        self.step(EngineDown())

    def lease_epoch(self) -> int | None:
        """Return the epoch of the lease under which turns may run now; None without one."""
        status = self.lease.status()
        return status.epoch if status.active(self._queue.now_s) else None

    def offer(self) -> Offer:
        """Return the offer that the node makes of this replica now; an unchanged offer is the same
        object.
        """
        spec = self.engine.spec
        said = Offer(
            replica=self.name,
            kind=self.kind,
            url=f"http://{self.name}:1",
            node=self.node.name,
            kv_tokens=self.engine.kv.units * self.engine.kv.unit_tokens
            if self.kind is ReplicaKind.DEDICATED
            else spec.kv_tokens,
            decode_tok_s=self._decode_tok_s,
            prefill_tok_s=self._prefill_tok_s,
            policy_version=self.version,
            healthy=self.up,
            ttl_s=OFFER_TTL_S,
            epoch=self.lease.status().epoch,
            max_sequences=spec.max_sequences,
            job=self.held_job,
        )
        # An unchanged offer is the same object, which the core compares at once.
        if said != self._offer:
            self._offer = said
        return self._offer or said

    def step(self, event: LeaseEvent) -> None:
        """Give the lease state machine an event, and carry out its actions and the events that
        follow.
        """
        events: list[LeaseEvent] = [event]
        while events:
            for action in self.lease.step(events.pop(), self._queue.now_s):
                match action:
                    case Admit():
                        self.admits = True
                        events.append(EngineAdmitted(action.epoch, action.life))
                    case Drain():
                        self.admits = False
                        aborted = self.engine.abort_all("revoked")
                        events.append(EngineDrained(action.life, aborted))
                    case LeaseTakenBack() | Ended():
                        self.node.told(self, action)
        self._count_lease()

    def _count_lease(self) -> None:
        active = self.lease_epoch() is not None
        now_s = self._queue.now_s
        if active and self._leased_since_s is None:
            self._leased_since_s = now_s
        elif not active and self._leased_since_s is not None:
            self._leased_s += now_s - self._leased_since_s
            self._leased_since_s = None

    def leased_until_now_s(self) -> float:
        """Return the seconds that the replica was under a lease so far."""
        since_s = self._leased_since_s
        return self._leased_s + (self._queue.now_s - since_s if since_s is not None else 0.0)

    def activate(self, version: int, job: str, apply_s: float) -> None:
        """Switch the replica to a version: its engine pauses for `apply_s` seconds and computes its
        KV anew.
        """
        self.version, self.held_job = version, job
        self.engine.recompute()
        self.engine.pause(apply_s)


class ModelledGuard:
    """Guard of one guest: production's core, with the modelled page in place of shared memory."""

    def __init__(self, replica: ModelledReplica, guest: ModelledGuest, config: GuardConfig) -> None:
        self._replica = replica
        self._guest = guest
        self._core = GrantController(config)
        self._reclaim: ReclaimCore | None = None
        self._answer: EngineReport | Unsupported | None = None
        self._reclaim_cap: int | None = None
        self._ticked_ns = -NS
        self.reclaims = 0

    def tick(self, now_ns: int) -> None:
        """Write a grant to the guest's page, and advance a reclaim of its memory; skipped for an
        idle guest within IDLE_GUARD_S of the last tick.
        """
        guest = self._guest
        lease = self._replica.lease_epoch()
        busy = lease is not None and not guest.idle
        if not busy and self._reclaim is None and now_ns - self._ticked_ns < IDLE_GUARD_S * NS:
            return
        self._ticked_ns = now_ns
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
    """Model of one node daemon, connected by stream number `stream`.

    say: callback that sends the scheduler an event.
    """

    def __init__(
        self, stream: int, say: Callable[[Event], None], transfer: ModelledTransfer, *, far: bool
    ) -> None:
        """Create a node without replicas. far: it is behind the slow link."""
        self.name = f"node-{stream - 1}"
        self.stream = stream
        self.far = far
        self.queue = transfer.queue
        self.replicas: dict[str, ModelledReplica] = {}
        self.guards: list[ModelledGuard] = []
        # Callback for a replica that has activated a version.
        self.on_activated: Callable[[ModelledReplica], None] = lambda replica: None
        self._say = say
        self._transfer = transfer
        self._newest: dict[str, int] = {}

    def add(
        self, name: str, kind: ReplicaKind, engine: ModelledEngine, *, up: bool = True
    ) -> ModelledReplica:
        """Add a replica with this engine to the node, and return it."""
        replica = self.replicas[name] = ModelledReplica(self, name, kind, engine, up=up)
        return replica

    def start(self) -> None:
        """Attach to the scheduler, and schedule reports and the guards' ticks."""
        self._say(Attached(self.name, self.stream, cluster="far" if self.far else "near"))
        self.report()
        # Spread the nodes' reports over the period.
        offset_s = 0.013 * self.stream % REPORT_S
        self.queue.every_s(REPORT_S, self.report, offset_s)
        if self.guards:
            self.queue.every_s(GUARD_S, self._guard, 0.0007 * self.stream)

    def report(self) -> None:
        """Expire leases that are over, and send the scheduler offers of all replicas whose engines
        are up.
        """
        for replica in self.replicas.values():
            replica.step(LeaseTick())
        offers = tuple(each.offer() for each in self.replicas.values() if each.up)
        self._say(Offered(self.stream, offers))

    def obey(self, command: pb.NodeCommand) -> None:
        """Carry out a command of the scheduler: a lease, renewals, a release, or a version."""
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
                    self.catch_up(replica)

    def start_engine(self, replica: ModelledReplica) -> None:
        """Start a replica's engine, which then fetches the newest version."""
        replica.engine_up()
        self.catch_up(replica)

    def take_card(self, replica: ModelledReplica, reason: str) -> None:
        """End a replica's lease and its engine, because its card is needed."""
        replica.step(Revoked(reason))
        if replica.up:
            replica.engine_down()

    def told(self, replica: ModelledReplica, word: LeaseTakenBack | Ended) -> None:
        """Tell the scheduler that a replica's lease was taken back, or that a requested drain has
        ended.
        """
        if isinstance(word, LeaseTakenBack):
            self._say(TakenBack(self.stream, replica.name, word.epoch, word.reason))
        elif word.asked:
            self._say(ReplicaDrained(self.stream, replica.name, word.epoch, word.aborted))

    def _leased(self, lease: pb.Lease) -> None:
        replica = self.replicas.get(lease.replica)
        if replica is not None:
            replica.step(Granted(lease.epoch, lease.ttl_s))

    def catch_up(self, replica: ModelledReplica) -> None:
        """Fetch the newest version and activate it on a replica, one version at a time, until it is
        up to date.
        """
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
            replica.activate(version, job, self._transfer.links.apply_s)
            self.queue.after_s(self._transfer.links.apply_s, activated)

        def activated() -> None:
            if not replica.up or not replica.updating:
                return
            replica.updating = False
            if isinstance(replica.engine, ModelledGuest):
                replica.engine.policy_version = version
            self._say(Activated(self.stream, replica.name, version, True, "", job))
            self.report()
            self.on_activated(replica)
            self.catch_up(replica)

        self.queue.after_s(takes_s, fetched)

    def _guard(self) -> None:
        now_ns = self.queue.now_ns
        for guard in self.guards:
            guard.tick(now_ns)

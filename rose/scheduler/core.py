"""The scheduler without sockets, files and clocks: `step(event, now_s) -> actions`.

    node attaches --> its mode and caps, whole version chain
    stream breaks --> its leases end at once
    offers, tick  --> leases expire, are renewed, granted, released, as the mode allows
    revocation    --> the lease ends, a pause, a new lease under a greater epoch
    version       --> stored, then told to all nodes
    demand        --> kept for each gateway: what a policy goes by
    silence       --> the node relays no weights until it speaks again
    policy, stop  --> each node that it changes is told its mode and caps

What must survive this process is durable before anybody is told. `writes` says what that is for a
request, which is carried out once it is written. Of leases it is their epochs: a `Reserve` action
asks for one, and the lease is granted with the `EpochReserved` that follows. Nothing else waits for
the store, so live leases are renewed while it does not answer.
"""

from elastic_scheduler import HarvestMode, Policy, ReplicaKind
from rose.errors import RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.capacity import Capacity
from rose.scheduler.demand import DemandBook
from rose.scheduler.fleet import Fleet, HealthBook, NodeView, Relays
from rose.scheduler.leasing import LeaseTimes, Leasing, replica_rows, snapshot
from rose.scheduler.limits import Complaints
from rose.scheduler.messages import (
    Action,
    Activated,
    Answer,
    Attached,
    CloseStream,
    Command,
    Demanded,
    Detached,
    EpochReserved,
    Event,
    HarvestSet,
    JobRegistered,
    LogRecord,
    Offered,
    PolicyApplied,
    PolicyDeleted,
    PublishTable,
    RatesMeasured,
    ReplicaDrained,
    RevokeAsked,
    StoredEvent,
    StoreWrite,
    TakenBack,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.persistence import (
    JobRecord,
    Saved,
    VersionRecord,
    save_job,
    save_version,
)
from rose.scheduler.version_registry import VersionRegistry

TABLE_INTERVAL_S = 1.0
MAX_NODES = 4_096
# Of one stream: a node's engines keep their names.
MAX_NAMED = 4_096


class SchedulerCore:
    """Core of a scheduler, with all its decisions. A `step` that is refused changes nothing."""

    def __init__(
        self,
        saved: Saved,
        default_mode: HarvestMode = HarvestMode.OFF,
        times: LeaseTimes | None = None,
        leasing_policy: Policy | None = None,
    ) -> None:
        self.capacity = Capacity(saved, default_mode)
        self._fleet = Fleet()
        self._relays = Relays()
        self._healths = HealthBook()
        self.demand = DemandBook()
        self._leasing = Leasing(
            times or LeaseTimes(),
            saved.epochs,
            self.capacity.gate,
            self._healths,
            self.demand,
            leasing_policy,
        )
        self._chain = VersionRegistry(saved.job, saved.versions)
        self._table = pb.ReplicaTable()
        self._published_s: float | None = None
        self._complaints = Complaints()

    def step(self, event: Event, now_s: float) -> list[Action]:
        """What follows from an event at `now_s`, a monotonic clock's seconds."""
        self.demand.drop_silent(now_s)
        actions = self._react(event, now_s)
        if isinstance(event, Tick | HarvestSet | PolicyApplied | PolicyDeleted):
            wall_s = event.wall_s if isinstance(event, Tick) else None
            actions += self.capacity.judge(self._fleet, now_s, wall_s)
        regulated = self._leasing.regulate(self._chain, self._fleet, now_s)
        if isinstance(event, HarvestSet):
            releasing = [
                each
                for each in regulated
                if isinstance(each, LogRecord) and each.event == "lease_releasing"
            ]
            actions.append(Answer(len(releasing)))
        told = self._relays.told(self._fleet.nodes, now_s)
        unsaid = self._complaints.due(now_s)
        return actions + regulated + told + unsaid + self._publish(now_s)

    def writes(self, event: StoredEvent) -> tuple[StoreWrite, ...]:
        """What has to be durable before the event is carried out.

        Raises `RefusedError` and `ConfigError` for one that cannot be.
        """
        match event:
            case JobRegistered():
                self._chain.check_job(event.job)
                return (save_job(JobRecord(event.job, event.max_staleness)),)
            case VersionAnnounced():
                record = VersionRecord(event.version, event.parent, event.url)
                return (save_version(record),) if self._chain.check(event.job, record) else ()
            case HarvestSet() | PolicyApplied() | PolicyDeleted():
                return self.capacity.writes(event)

    def complain(self, event: str, peer: str, reason: str, now_s: float) -> list[LogRecord]:
        """What to record of a peer's mistake: each once, and so many a minute.

        Not an event of `step`, whose own failure is complained of.
        """
        return self._complaints.about(event, peer, reason, now_s)

    def status(self, now_s: float) -> pb.SnapshotReply:
        """Everything an operator may ask about."""
        views = (self._fleet, self._leasing, self._healths, self._chain, self.capacity)
        return snapshot(*views, self.demand, now_s)

    def _react(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case Attached():
                return self._attach(event, now_s)
            case Detached():
                return self._detach(event.stream)
            case Demanded():
                self.demand.hear(event.gateway, event.jobs, now_s)
                actions, refused = self._leasing.switched(event.switches, now_s)
                for reason in refused:
                    actions += self.complain("switch_refused", event.gateway, reason, now_s)
                return actions
            case RevokeAsked():
                return self._revoke(event, now_s)
            case EpochReserved():
                self._leasing.reserved(event.replica, event.epoch)
                return []
            case Tick():
                return []
            case (
                JobRegistered()
                | VersionAnnounced()
                | HarvestSet()
                | PolicyApplied()
                | PolicyDeleted()
            ):
                return self._carry_out(event, now_s)
        view = self._fleet.of_stream(event.stream)
        if view is None:  # A stream that was replaced or lost has no say any more.
            return []
        view.heard_s = now_s
        return self._hear(event, view, now_s)

    def _carry_out(self, event: StoredEvent, now_s: float) -> list[Action]:
        match event:
            case JobRegistered():
                self._chain.register(event.job, event.max_staleness)
                return [*self._rejudge(now_s), Answer(self._chain.latest)]
            case VersionAnnounced():
                return self._announce(event, now_s)
            case HarvestSet() | PolicyApplied() | PolicyDeleted():
                return self.capacity.carry_out(event)

    def _hear(
        self,
        event: Offered | RatesMeasured | TakenBack | ReplicaDrained | Activated,
        view: NodeView,
        now_s: float,
    ) -> list[Action]:
        match event:
            case Offered():
                return self._offered(event, view, now_s)
            case RatesMeasured():
                view.telemetry = event.telemetry
                self.capacity.heard(view, event.telemetry, now_s, lends=self._lends(view, now_s))
                return []
            case TakenBack():
                return self._leasing.taken_back(
                    event.stream, event.replica, event.epoch, event.reason, now_s
                )
            case ReplicaDrained():
                return self._leasing.drained(event.stream, event.replica, event.epoch)
            case Activated():
                return self._activated(event, view)

    def _offered(self, event: Offered, view: NodeView, now_s: float) -> list[Action]:
        if len(view.named.union(each.replica for each in event.offers)) > MAX_NAMED:
            raise RefusedError(
                f"node {view.node} offered {MAX_NAMED} replicas by now; give engines lasting names"
            )
        silent = view.lapsed(now_s)
        lapsed = self._leasing.lapsed(silent) + self._healths.lapsed(silent)
        believed = tuple(each for each in event.offers if self._leasing.believes(each))
        taken = self._fleet.replace_offers(view, believed, now_s)
        heard = self._healths.hear(view.offers.values(), self._chain)
        reasons = [
            *event.refused,
            *(f"{replica} is offered by another node already" for replica in taken),
            *(
                f"epoch {each.epoch} of {each.replica} is far ahead of this store; start its node"
                " anew"
                for each in event.offers
                if not self._leasing.believes(each)
            ),
        ]
        complaints: list[Action] = []
        for reason in reasons:
            complaints += self.complain("offer_refused", view.node, reason, now_s)
        return lapsed + heard + complaints

    def _attach(self, event: Attached, now_s: float) -> list[Action]:
        actions: list[Action] = []
        earlier = self._fleet.of_node(event.node)
        if earlier is None and len(self._fleet.streams) >= MAX_NODES:
            raise RefusedError(f"{MAX_NODES} nodes are attached; give others a scheduler of theirs")
        if earlier is not None:
            # The node came back before its old stream was noticed broken.
            actions += [
                *self._detach(earlier.stream),
                CloseStream(earlier.stream, f"node {event.node} attached anew"),
            ]
        self._fleet.attach(event.node, event.stream, event.cluster, event.relay_url, now_s)
        view = self._fleet.of_stream(event.stream)
        assert view is not None
        view.labels, view.takes_caps = dict(event.labels), event.takes_caps
        actions += self.capacity.greet(view, now_s)
        actions += [Command(event.stream, command) for command in self._chain.commands()]
        return [*actions, LogRecord("node_attached", {"node": event.node})]

    def _detach(self, stream: int) -> list[Action]:
        view = self._fleet.detach(stream)
        if view is None:
            return []
        self._healths.forget(view.named)
        self.capacity.detached(view)
        return [LogRecord("node_lost", {"node": view.node}), *self._leasing.lost(stream)]

    def _activated(self, event: Activated, view: NodeView) -> list[Action]:
        if event.ok:
            self._fleet.set_version(view, event.replica, event.version)
            return self._healths.hear(view.offers.values(), self._chain)
        fields = {"replica": event.replica, "version": event.version, "message": event.message}
        return [LogRecord("activation_failed", {"node": view.node, **fields})]

    def _announce(self, event: VersionAnnounced, now_s: float) -> list[Action]:
        record = VersionRecord(event.version, event.parent, event.url)
        if not self._chain.announce(event.job, record):
            return [Answer(0)]
        streams, command = self._fleet.streams, self._chain.command(record)
        fields: dict[str, object] = {"job": event.job, "version": event.version}
        return [
            *(Command(stream, command) for stream in streams),
            LogRecord("version_announced", {**fields, "parent": event.parent}),
            *self._rejudge(now_s),
            Answer(len(streams)),
        ]

    def _rejudge(self, now_s: float) -> list[Action]:
        """A newer version or another bound: whoever is behind gets no turns from now on."""
        return self._healths.hear(self._fleet.live_offers(now_s), self._chain)

    def _revoke(self, event: RevokeAsked, now_s: float) -> list[Action]:
        revoked = self._leasing.revoke(event.replica, event.reason, now_s)
        if revoked is None:
            raise RefusedError(
                f"replica {event.replica!r} has no lease to revoke; `rose status` lists leases"
            )
        lease, actions = revoked
        return [*actions, Answer(lease.epoch)]

    def _lends(self, view: NodeView, now_s: float) -> bool:
        """Whether a guest of the node is leased now."""
        return any(
            offer.kind is ReplicaKind.GUEST and self._leasing.active(offer.replica, now_s)
            for offer in view.offers.values()
        )

    def _publish(self, now_s: float) -> list[Action]:
        table = pb.ReplicaTable(
            revision=self._table.revision,
            replicas=replica_rows(self._fleet, self._leasing, self._healths, now_s),
            latest_version=self._chain.latest,
        )
        due = self._published_s is None or now_s >= self._published_s + TABLE_INTERVAL_S
        if table == self._table and not due:
            return []
        table.revision += 1
        self._table, self._published_s = table, now_s
        return [PublishTable(table)]

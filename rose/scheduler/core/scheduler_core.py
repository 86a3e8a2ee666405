"""The scheduler without sockets, files and clocks: `step(event, now_s) -> actions`.

    node attaches --> its mode and caps, version chains of all jobs
    stream breaks --> its leases end at once
    offers, tick  --> leases expire, are renewed, granted, released, as the mode allows
    revocation    --> the lease ends, a pause, a new lease under a greater epoch
    version       --> of one job: stored, then told to all nodes
    job ends      --> its leases are released, its name and newest version are kept
    run           --> one trainer has a job at a time; who lost it is refused
    demand        --> kept for each gateway: what a policy goes by
    quotas        --> kept for each job: its guests beyond them are released
    silence       --> the node relays no weights until it speaks again
    policy, stop  --> each node that it changes is told its mode and caps
    new leader    --> leases that nodes hold of the one before go on, under their epochs

A change that must survive this process is durable before its caller is answered: `writes` returns a
request's writes, and the request is carried out once they are done. A lease needs its epoch stored:
a `Reserve` action stores one, and the lease is granted at the `EpochReserved` event that follows.
No other action waits for the store, so live leases are renewed while it does not answer.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_scheduler import HarvestMode, Offer, Policy, ReplicaKind
from rose.contract.weights import RUN_TTL_S
from rose.errors import RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.capacity import CapacityBook
from rose.scheduler.core.demand import DemandBook
from rose.scheduler.core.fleet import FORGOTTEN_S, LAPSED_S, FleetBook, HealthBook, NodeView, Relays
from rose.scheduler.core.job_registry import JobRegistry, version_command
from rose.scheduler.core.leasing import PACE_S, SMALL_FLEET, LeaseTimes, Leasing
from rose.scheduler.core.messages import (
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
    JobDropped,
    JobEnded,
    JobRegistered,
    LogRecord,
    Obeyed,
    ObjectsHeard,
    Offered,
    PolicyApplied,
    PolicyDeleted,
    PublishTable,
    QuotasHeard,
    RatesMeasured,
    ReplicaDrained,
    RevokeAsked,
    RunEnded,
    RunRenewed,
    StoredEvent,
    TakenBack,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.core.observed import (
    Books,
    Observed,
    PolicyView,
    explained,
    observe,
    policy_views,
    replica_rows,
    snapshot,
)
from rose.scheduler.core.quotas import QuotaBook
from rose.scheduler.core.runs import RunBook
from rose.scheduler.core.usage import GuestReading, UsageBook, owner_of
from rose.scheduler.persistence import RUNS, JobRecord, Saved, VersionRecord, forget, save
from rose.store.protocol import Delete, Write

TABLE_INTERVAL_S = 1.0
MAX_NODES = 4_096
LEASE_GRANTED = "lease_granted"
# Bound on the replicas that one stream may name: a node's engines keep their names.
MAX_NAMED = 4_096
# Complaints that are told from new ones.
REMEMBERED = 1_024
# Offers repeat twice a second, and a peer can make new mistakes for ever.
MOST_A_MINUTE = 60
MINUTE_S = 60.0


class Complaints:
    """Filter of log records about peers' mistakes: each mistake once, at most 60 a minute.

    A mistake is known by (event, peer, reason), and the latest 1,024 are remembered. Times are
    monotonic seconds.
    """

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._minute_s: float | None = None
        self._written = 0
        self._unsaid = 0

    def about(self, event: str, peer: str, reason: str, now_s: float) -> list[LogRecord]:
        """Return the log records for a peer's mistake: none if repeated or beyond 60 in this
        minute.

        A record of the number left out comes first if a minute just ended.
        """
        told = self.due(now_s)
        key = (event, peer, reason)
        if key in self._said:
            self._said.move_to_end(key)
            return told
        if self._minute_s is None:
            self._minute_s = now_s
        if self._written >= MOST_A_MINUTE:
            self._unsaid += 1
            return told
        self._written += 1
        self._said[key] = None
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        return [*told, LogRecord(event, {"node": peer, "reason": reason})]

    def due(self, now_s: float) -> list[LogRecord]:
        """Return a log record of the number of mistakes left out in the minute, once it is over.

        An empty list means that the minute still runs or that none was left out.
        """
        if self._minute_s is None or now_s < self._minute_s + MINUTE_S:
            return []
        unsaid, self._unsaid = self._unsaid, 0
        self._minute_s, self._written = None, 0
        return [LogRecord("complaints_unsaid", {"count": unsaid})] if unsaid else []


class SchedulerCore:
    """Core of a scheduler, which makes all its decisions without IO.

    A `step` that raises RefusedError changes nothing.
    """

    def __init__(
        self,
        saved: Saved,
        default_mode: HarvestMode = HarvestMode.OFF,
        times: LeaseTimes | None = None,
        leasing_policy: Policy | None = None,
        standing: Iterable[str] = (),
        run_ttl_s: float = RUN_TTL_S,
        *,
        asks_objects: bool = False,
        label_keys: Sequence[str] = (),
        quotas: Mapping[str, str] | None = None,
    ) -> None:
        """Begin from what the store has: jobs, versions, runs, epochs, modes and policies.

        standing: jobs that get their dedicated replicas even without a trainer. asks_objects: True
        if this scheduler reads capacity policies from a Kubernetes API server. label_keys: patterns
        of the labels of nodes that it reads there. quotas: namespaces of placeholder pods, by job.
        """
        self.capacity = CapacityBook(
            saved, default_mode, asks_objects=asks_objects, asks_labels=bool(label_keys)
        )
        self._fleet = FleetBook(label_keys)
        self._stored_nodes = saved.nodes
        self._relays = Relays()
        self._healths = HealthBook()
        self.demand = DemandBook()
        self.usage = UsageBook()
        self._jobs = JobRegistry(saved.jobs, saved.versions, standing)
        self.quotas = QuotaBook(quotas or {})
        self._leasing = Leasing(
            times or LeaseTimes(),
            saved,
            self.capacity.gate,
            self._fleet,
            self._healths,
            self._jobs,
            self.demand,
            self.quotas,
            leasing_policy,
        )
        self.runs = RunBook(saved.runs, run_ttl_s)
        self._books = Books(
            self._fleet,
            self._leasing,
            self._healths,
            self._jobs,
            self.capacity,
            self.demand,
            self.runs,
            self.usage,
            self.quotas,
        )
        self._table = pb.ReplicaTable()
        self._published_s: float | None = None
        # Inputs and time of the last rows.
        self._made_of: tuple[object, ...] = ()
        self._made_s = -math.inf
        self._news = False
        self._complaints = Complaints()
        self._handlers: dict[type[Event], Callable[[Any, float], list[Action]]] = {
            Attached: self._attach,
            Detached: lambda event, _: self._detach(event.stream),
            Demanded: self._demanded,
            QuotasHeard: lambda event, _: self.quotas.heard(event),
            RevokeAsked: self._revoke,
            EpochReserved: lambda event, _: self._leasing.reserved(event.replica, event.epoch),
            RunRenewed: lambda event, _: self._renew(event),
            JobRegistered: self._register,
            JobEnded: lambda event, _: self._end_job(event),
            JobDropped: self._drop,
            RunEnded: lambda event, _: self._end_run(event),
            VersionAnnounced: self._announce,
            HarvestSet: lambda event, _: self.capacity.carry_out(event),
            PolicyApplied: lambda event, _: self.capacity.carry_out(event),
            PolicyDeleted: lambda event, _: self.capacity.carry_out(event),
        }
        self._node_handlers: dict[type[Event], Callable[[Any, NodeView, float], list[Action]]] = {
            Offered: self._offered,
            RatesMeasured: self._measured,
            TakenBack: lambda event, _, now_s: self._leasing.taken_back(event, now_s),
            ReplicaDrained: lambda event, *_: self._leasing.drained(event),
            Activated: lambda event, view, _: self._activated(event, view),
            Obeyed: lambda event, view, now_s: view.obeyed(event.order, now_s),
        }

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions to carry out, in order, for an event at `now_s` in monotonic seconds.

        Raises RefusedError for a request that cannot be carried out.
        """
        self.demand.drop_silent(now_s)
        self.runs.at(now_s, event.wall_s if isinstance(event, Tick) else None)
        if isinstance(event, Tick):
            self._recall(event, now_s)
        if isinstance(event, ObjectsHeard):
            self.capacity.objects_heard(event)
            self._fleet.relabel(event.labels)
        actions = self._react(event, now_s)
        if isinstance(event, Tick | HarvestSet | PolicyApplied | PolicyDeleted):
            wall_s = event.wall_s if isinstance(event, Tick) else None
            actions += self.capacity.judge(self._fleet, now_s, wall_s)
        news = not isinstance(
            event,
            Tick | Offered | RatesMeasured | Obeyed | EpochReserved | RunRenewed | ObjectsHeard,
        )
        # The answers to these events count the leases that are released.
        at_once = isinstance(
            event, HarvestSet | JobEnded | JobDropped | PolicyApplied | PolicyDeleted
        )
        regulated = self._leasing.regulate(now_s, news=news, at_once=at_once)
        records = [each for each in regulated if isinstance(each, LogRecord)]
        granted = [str(each.fields["replica"]) for each in records if each.event == LEASE_GRANTED]
        if isinstance(event, HarvestSet | JobEnded):
            actions.append(Answer(sum(each.event == "lease_releasing" for each in records)))
        # Another job's replica takes no turns before it has this one's weights.
        offers = self._fleet.live_offers(now_s)
        regulated += self._judge(offers[name] for name in granted if name in offers)
        told = self._relays.told(lambda: self._fleet.nodes, now_s)
        unsaid = self._complaints.due(now_s)
        news |= bool(records) or any(isinstance(each, LogRecord) for each in actions)
        return actions + regulated + told + unsaid + self._publish(now_s, news=news)

    def writes(self, event: StoredEvent) -> tuple[Write, ...]:
        """Return the writes that must be durable before `step` is called with the event.

        An empty tuple means that nothing needs to be stored. Raises `RefusedError` or `ConfigError`
        for a request that cannot be carried out.
        """
        match event:
            case JobRegistered():
                job = self._jobs.registering(_job_of(event))
                run = self.runs.beginning(event.job, event.claim, take_over=event.take_over)
                return (save(job), *([save(run)] if run else []))
            case JobEnded():
                ended, past = self._jobs.ending(event.job)
                over = self.runs.ending(event.job, event.claim)
                return (save(ended), *map(forget, past), *([save(over)] if over else []))
            case JobDropped():
                dropped, past = self._jobs.dropping(event.job)
                self.runs.check_drop(event.job, force=event.force)
                return (save(dropped), *map(forget, past), Delete(RUNS + event.job))
            case RunEnded():
                over = self.runs.ending(event.job, event.claim)
                return (save(over),) if over else ()
            case VersionAnnounced():
                record = _version_of(event)
                self.runs.check(event.job, event.claim)
                chain = self._jobs.announced(event.job)
                if not chain.check(record):
                    return ()
                past = chain.replaced_by(record)
                return (save(record), *map(forget, past))
            case HarvestSet() | PolicyApplied() | PolicyDeleted():
                return self.capacity.writes(event)

    def complain(self, event: str, peer: str, reason: str, now_s: float) -> list[LogRecord]:
        """Return the log records for a peer's mistake: each mistake once, at most 60 a minute.

        The driver calls this for input that `step` refused or never saw.
        """
        return self._complaints.about(event, peer, reason, now_s)

    def newest(self, job: str) -> VersionRecord | None:
        """Return the record of the job's newest announced version, None before the first."""
        return self._jobs.chain(job).newest

    def status(self, now_s: float) -> pb.SnapshotReply:
        """Return the whole fleet as the reply to `rose status`: replicas, leases, hosts, jobs,
        nodes.
        """
        return snapshot(self.observed(now_s, budgets=False))

    def explained(self, node: str, now_s: float) -> list[pb.NodeCapacity]:
        """Return, for one node or all (""), each policy field with the policy that decides it.

        Raises RefusedError for a node that is not attached.
        """
        return explained(self.observed(now_s, budgets=False), node)

    def outlook(self, event: PolicyApplied, now_s: float) -> pb.ApplyPolicyReply:
        """Return what applying a policy would change, the nodes that it selects, and the guests
        whose leases would end. Raises RefusedError.
        """
        changed = self.capacity.would_change(event)
        seen, nodes = self.observed(now_s, budgets=False), list(self._fleet.nodes)
        offers = [each.offer for each in seen.replicas]
        leases = [each.lease for each in seen.leases]
        selected, ends = self.capacity.outlook(event.policy, nodes, offers, leases)
        return pb.ApplyPolicyReply(changed=changed, nodes=selected, ends=ends, attached=len(nodes))

    def lendable(self, now_s: float) -> dict[str, int]:
        """Return the number of guests that may be lent now, by node; nodes without are left out."""
        mode_of, offers = self.capacity.gate.mode_of, self._fleet.live_offers(now_s).values()
        guests = ((e.node, e.replica) for e in offers if e.kind is ReplicaKind.GUEST)
        return Counter(node for node, e in guests if mode_of(e, node) is HarvestMode.ACTIVE)

    def policy_views(self, now_s: float) -> dict[str, PolicyView]:
        """Return the status of each capacity policy in force on its nodes, by policy name."""
        return policy_views(self.observed(now_s, budgets=False))

    def observed(self, now_s: float, *, budgets: bool = True) -> Observed:
        """Return an immutable snapshot of the fleet, with remaining SLO budgets if `budgets`."""
        return observe(self._books, now_s, budgets=budgets)

    def _react(self, event: Event, now_s: float) -> list[Action]:
        handle = self._handlers.get(type(event))
        if handle is not None:
            return handle(event, now_s)
        if isinstance(event, Tick | ObjectsHeard):
            return []
        view = self._fleet.of_stream(event.stream)  # type: ignore[union-attr]  # of a node
        if view is None:  # A stream that was replaced or lost has no say any more.
            return []
        if now_s >= view.heard_s + LAPSED_S:
            self._relays.changed()
        view.heard_s = now_s
        return self._node_handlers[type(event)](event, view, now_s)

    def _demanded(self, event: Demanded, now_s: float) -> list[Action]:
        self.demand.hear(event.gateway, event.jobs, now_s)
        actions, refused = self._leasing.switched(event.switches, now_s)
        for reason in refused:
            actions += self.complain("switch_refused", event.gateway, reason, now_s)
        return actions

    def _recall(self, event: Tick, now_s: float) -> None:
        """Add nodes from which an earlier leader leased in the last day to the known nodes that are
        away.
        """
        if self._stored_nodes and event.wall_s is not None:
            since_s = event.wall_s - FORGOTTEN_S
            lately = [node for node, at_s in self._stored_nodes.items() if at_s >= since_s]
            self._fleet.recall(lately, now_s)
            self._stored_nodes = {}

    def _measured(self, event: RatesMeasured, view: NodeView, now_s: float) -> list[Action]:
        view.telemetry = event.telemetry
        self.capacity.heard(view, event.telemetry, now_s, lends=self._lends(view, now_s))
        self.usage.heard(view.node, owner_of(view.hello.labels), self._guests(view), now_s)
        return []

    def _guests(self, view: NodeView) -> Iterator[GuestReading]:
        for said in view.telemetry.guests:
            offer = view.offers.get(said.replica)
            if offer is not None and offer.kind is ReplicaKind.GUEST:
                job = self._leasing.leased_to(said.replica)
                figures = said.duty, said.kv_bytes, said.tokens_total, said.ranks
                yield GuestReading(said.replica, job, *figures)

    def _offered(self, event: Offered, view: NodeView, now_s: float) -> list[Action]:
        if len(view.named.union(each.replica for each in event.offers)) > MAX_NAMED:
            raise RefusedError(
                f"node {view.node} offered {MAX_NAMED} replicas by now; give engines lasting names"
            )
        silent = view.lapsed(now_s)
        lapsed = self._leasing.lapsed(silent) + self._healths.lapsed(silent)
        believed = tuple(each for each in event.offers if self._leasing.believes(each))
        told = tuple(self._attributed(each) for each in believed)
        taken = self._fleet.replace_offers(view, told, now_s)
        heard = self._judge(view.offers.values())
        live = {each.job for each in self._jobs.live}
        adopted = self._leasing.adopt(event.stream, view.offers.values(), event.held, live, now_s)
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
        return lapsed + heard + adopted + complaints

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
        self._fleet.attach(event, now_s)
        self._relays.changed()
        view = self._fleet.of_stream(event.stream)
        assert view is not None
        actions += self.capacity.greet(view, now_s)
        actions += [Command(event.stream, command) for command in self._jobs.commands()]
        return [*actions, LogRecord("node_attached", {"node": event.node})]

    def _detach(self, stream: int) -> list[Action]:
        view = self._fleet.detach(stream)
        if view is None:
            return []
        self._relays.changed()
        self._healths.forget(view.named)
        self.capacity.detached(view)
        self.usage.forget(view.node)
        return [LogRecord("node_lost", {"node": view.node}), *self._leasing.lost(stream)]

    def _activated(self, event: Activated, view: NodeView) -> list[Action]:
        job = event.job or self._only_job
        if event.ok:
            self._fleet.set_version(view, event.replica, job, event.version)
            return self._judge(view.offers.values())
        fields = {"replica": event.replica, "version": event.version, "message": event.message}
        return [LogRecord("activation_failed", {"node": view.node, **fields})]

    def _announce(self, event: VersionAnnounced, now_s: float) -> list[Action]:
        record = _version_of(event)
        if not self._jobs.announced(event.job).announce(record):
            return [Answer(0)]
        streams, command = self._fleet.streams, version_command(record)
        fields: dict[str, object] = {"job": event.job, "version": event.version}
        return [
            *(Command(stream, command) for stream in streams),
            LogRecord("version_announced", {**fields, "parent": event.parent}),
            *self._rejudge(now_s),
            Answer(len(streams)),
        ]

    def _rejudge(self, now_s: float) -> list[Action]:
        """Judge the health of all offered replicas anew, after a job's version or bound changed."""
        return self._judge(self._fleet.live_offers(now_s).values())

    def _judge(self, offers: Iterable[Offer]) -> list[Action]:
        return self._healths.hear(offers, self._jobs, self._leasing.leased_to)

    def _register(self, event: JobRegistered, now_s: float) -> list[Action]:
        """Register the job, begin its run, and answer with its greatest used version."""
        self._jobs.register(_job_of(event))
        began = self._begin(event)
        return [*began, *self._rejudge(now_s), Answer(self._jobs.chain(event.job).used)]

    def _begin(self, event: JobRegistered) -> list[Action]:
        """Give the job to the event's run, as `writes` allowed; return log records, none without a
        run.
        """
        if event.claim is None:
            return []
        # Allowed when it was written: renewals of another run since then change nothing.
        record = self.runs.beginning(event.job, event.claim, take_over=True)
        assert record is not None
        lost = self.runs.begin(record)
        fields: dict[str, object] = {"job": event.job, "run": record.run, "holder": record.holder}
        if lost is None:
            return [LogRecord("run_began", fields)]
        return [LogRecord("run_taken_over", {**fields, "from": lost.holder})]

    def _end_job(self, event: JobEnded) -> list[Action]:
        self._jobs.end(event.job)
        if (over := self.runs.ending(event.job)) is not None:
            self.runs.end(over)
        self.demand.forget(event.job)
        return [LogRecord("job_ended", {"job": event.job})]

    def _end_run(self, event: RunEnded) -> list[Action]:
        if (over := self.runs.ending(event.job, event.claim)) is not None:
            self.runs.end(over)
        return [LogRecord("run_ended", {"job": event.job, "run": event.claim.run}), Answer(0)]

    def _renew(self, event: RunRenewed) -> list[Action]:
        if self._jobs.get(event.job) is None:
            raise RefusedError(f"job {event.job} was ended or dropped; start its trainer anew")
        self.runs.renew(event.job, event.claim)
        return [Answer(self._jobs.chain(event.job).used)]

    def _drop(self, event: JobDropped, now_s: float) -> list[Action]:
        past = len(self._jobs.chain(event.job).records)
        self._jobs.drop(event.job)
        self.runs.drop(event.job)
        self.demand.forget(event.job)
        dropped = LogRecord("job_dropped", {"job": event.job, "versions": past})
        return [dropped, *self._rejudge(now_s), Answer(past)]

    @property
    def _only_job(self) -> str:
        return self._jobs.only.job if self._jobs.only else ""

    def _attributed(self, offer: Offer) -> Offer:
        """Return the offer, with the only job's name if its version belongs to no named job."""
        if offer.job or not offer.policy_version or not self._only_job:
            return offer
        return replace(offer, job=self._only_job)

    def _revoke(self, event: RevokeAsked, now_s: float) -> list[Action]:
        revoked = self._leasing.revoke(event.replica, event.reason, now_s)
        if revoked is None:
            raise RefusedError(
                f"replica {event.replica!r} has no lease to revoke; `rose status` lists leases"
            )
        lease, actions = revoked
        return [*actions, Answer(lease.epoch)]

    def _lends(self, view: NodeView, now_s: float) -> bool:
        """Return True if a guest of the node is leased now."""
        return any(
            offer.kind is ReplicaKind.GUEST and self._leasing.active(offer.replica, now_s)
            for offer in view.offers.values()
        )

    def _publish(self, now_s: float, *, news: bool) -> list[Action]:
        """Return a PublishTable action if the replica table changed or is a second old, else
        nothing.

        In a fleet of more than 64 replicas changes are published every 0.25 s at most.
        """
        due = self._published_s is None or now_s >= self._published_s + TABLE_INTERVAL_S
        settling = self._leasing.settling(now_s)
        self._fleet.live_offers(now_s)  # what ran out counts as a revision
        made_of = (self._fleet.revision, self._healths.revision, settling)
        self._news |= news or made_of != self._made_of
        self._made_of = made_of
        paced = self._news and now_s >= self._made_s + PACE_S
        if not (due or paced or self._fleet.size <= SMALL_FLEET):
            return []
        self._made_s, self._news = now_s, False
        table = pb.ReplicaTable(
            revision=self._table.revision,
            replicas=replica_rows(self._books, now_s),
            latest_version=self._jobs.chain(self._only_job).latest,
            jobs=[
                pb.JobRow(
                    job=each.job,
                    latest_version=self._jobs.chain(each.job).latest,
                    max_staleness=each.max_staleness,
                )
                for each in self._jobs.live
            ],
            settling=settling,
        )
        if table == self._table and not due:
            return []
        table.revision += 1
        self._table, self._published_s = table, now_s
        return [PublishTable(table)]


def _job_of(event: JobRegistered) -> JobRecord:
    return JobRecord(event.job, event.max_staleness, event.model, event.weight, event.max_guests)


def _version_of(event: VersionAnnounced) -> VersionRecord:
    run = event.claim.run if event.claim else ""
    return VersionRecord(event.job, event.version, event.parent, event.url, run)

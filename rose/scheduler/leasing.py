"""Leasing: decides leases from offers, modes and time, commands the nodes, and publishes the table.

Gateways get the table on every change, operators a snapshot on request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from elastic_scheduler import (
    Decision,
    HarvestModes,
    HarvestPlan,
    Holding,
    Lease,
    LeaseError,
    LeaseState,
    LeaseTable,
    Move,
    Offer,
    Policy,
    Reason,
    ReasonLog,
    ReplicaKind,
    Situation,
    make_policy,
)
from rose.rpc import rose_pb2 as pb
from rose.scheduler.demand import DemandBook, JobFigures, Switched
from rose.scheduler.fleet import Fleet, HealthBook
from rose.scheduler.messages import Action, Command, EpochReserved, LogRecord, Reserve
from rose.scheduler.persistence import JobRecord, save_epoch
from rose.scheduler.version_registry import VersionRegistry
from rose.scheduler.wire import KIND_TO, MODE_TO, lease_command, release_command

# A leased replica may miss turns this long, to catch up with a version, before others are sought.
HELPLESS_S = 15.0
# From a lease to its first token: an engine that takes longer has failed.
MAX_SWITCH_S = 600.0
# A gateway may have measured from a little before the grant, by its clock.
SWITCH_SLACK_S = 5.0
MAX_PROMISES = 4_096
# What broke is tried again after this: it must neither end its neighbours' leases nor fill a disk.
BROKEN_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Promise:
    """A lease that was decided and waits for its epoch to be durable."""

    move: Move
    epoch: int
    since_s: float


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Times of a lease: life unrenewed, renewal period, and the pause after a revoke."""

    ttl_s: float = 5.0
    renew_s: float = 1.0
    cooldown_s: float = 1.0


class Leasing:
    """The lease book of attached nodes. A lease belongs to the stream that it was sent on.

        decided --> promised --(its epoch is durable)--> granted

    What breaks for one replica, or in the policy, is recorded and rests; all else goes on.
    """

    def __init__(
        self,
        times: LeaseTimes,
        epochs: Mapping[str, int],
        allowed: HarvestModes,
        healths: HealthBook,
        demand: DemandBook,
        policy: Policy | None = None,
    ) -> None:
        self._times = times
        self._allowed = allowed
        self._healths = healths
        self._demand = demand
        self._policy = policy or make_policy("rose")
        self._log: ReasonLog[Reason] = ReasonLog()
        # Since when a lease lives, and its replica's newest offer: what a policy goes by.
        self._holdings: dict[str, Holding] = {}
        self._helped_s: dict[str, float] = {}
        self._switched: dict[str, int] = {}
        self._book = LeaseTable(times.ttl_s, epochs)
        self._stream_of: dict[str, int] = {}
        self._not_before_s: dict[str, float] = {}
        self._promises: dict[str, _Promise] = {}
        self._policy_rests_until_s = 0.0

    def believes(self, offer: Offer) -> bool:
        """Whether the node can have seen the epoch that it says."""
        return self._book.believes(offer.replica, offer.epoch)

    def reserved(self, replica: str, epoch: int) -> None:
        """The epoch is durable: `regulate` grants what was promised under it."""
        self._book.reserve(replica, epoch)

    def leases(self) -> tuple[Lease, ...]:
        """All leases that were not ended."""
        return self._book.leases()

    def active(self, replica: str, now_s: float) -> Lease | None:
        """The lease under which turns may be sent to the replica."""
        lease = self._book.live(replica, now_s)
        return lease if lease is not None and lease.state is LeaseState.ACTIVE else None

    def regulate(self, chain: VersionRegistry, fleet: Fleet, now_s: float) -> list[Action]:
        """Expire, release, renew and grant what is due: what the operator allows, as decided."""
        # First of all: after a pause of this process no lease may outlive its time by a renewal.
        actions: list[Action] = [
            LogRecord("lease_expired", _fields(lease)) for lease in self._book.expire(now_s)
        ]
        offers = {offer.replica: offer for offer in fleet.live_offers(now_s)}
        actions += self._keep_promises(offers, fleet, now_s)
        plan = self._allowed.plan(offers.values(), self._book.leases())
        for lease in plan.release:
            release = partial(self._release, lease, "harvest", now_s)
            actions += self._apart(lease.replica, release, now_s)
        for lease in plan.renew:
            actions += self._apart(lease.replica, partial(self._renew, lease, now_s), now_s)
        if chain.job is None:
            return actions
        self._forget_past(now_s)
        decision, broken = self._decide(chain.job.job, chain.latest, plan, offers, now_s)
        actions += broken
        for move in decision.take:
            take = partial(self._take, move, offers, fleet, now_s)
            actions += self._apart(move.replica, take, now_s)
        for move in decision.give_back:
            actions += self._apart(move.replica, partial(self._give_back, move, now_s), now_s)
        return actions

    def switched(
        self, switches: Iterable[Switched], now_s: float
    ) -> tuple[list[Action], list[str]]:
        """First tokens under leases that live: what a switch costs. Each lease has one.

        Returns what follows, and what is not believed: no switch can be longer than its lease.
        """
        actions: list[Action] = []
        refused: list[str] = []
        for each in switches:
            holding = self._holdings.get(each.replica)
            lease = self._current(each.replica, each.epoch)
            known = self._switched.get(each.replica) == each.epoch
            if lease is None or holding is None or known:
                continue
            most_s = min(MAX_SWITCH_S, now_s - holding.since_s + SWITCH_SLACK_S)
            if not 0 <= each.took_s <= most_s:
                refused.append(f"a switch to {lease.id} cannot have taken {each.took_s:.0f} s")
                continue
            self._switched[each.replica] = each.epoch
            self._policy.switched(holding.offer, each.took_s)
            actions.append(LogRecord("first_token", {**_fields(lease), "took_s": each.took_s}))
        return actions, refused

    def explained(self, replica: str) -> tuple[Reason, ...]:
        """Why the replica was leased and given back lately, oldest first."""
        return self._log.of(replica)

    def _held_now(
        self, leases: Sequence[Lease], offers: Mapping[str, Offer], now_s: float
    ) -> tuple[Holding, ...]:
        """Leases that help their job: what takes no turns for long must not count as capacity."""
        since_s = {name: holding.since_s for name, holding in self._holdings.items()}
        self._holdings = {
            lease.replica: Holding(
                lease.job,
                offers[lease.replica],
                since_s.get(lease.replica, lease.expires_s - self._times.ttl_s),
            )
            for lease in leases
        }
        self._helped_s = {
            name: now_s
            if self._healths.takes_turns(name)
            else self._helped_s.get(name, each.since_s)
            for name, each in self._holdings.items()
        }
        return tuple(
            each
            for name, each in self._holdings.items()
            if now_s < max(each.since_s, self._helped_s[name]) + HELPLESS_S
        )

    def _note(self, what: str, move: Move, now_s: float) -> None:
        self._log.note(move.replica, Reason(now_s, what, move.why, dict(move.figures)))

    def drained(self, stream: int, replica: str, epoch: int) -> list[Action]:
        """The node carried out a release; one of an older lease changes nothing."""
        lease = self._held(stream, replica, epoch)
        if lease is None:
            return []
        self._book.released(replica, epoch)
        return [LogRecord("lease_released", {**_fields(lease), "reason": "drained"})]

    def taken_back(
        self, stream: int, replica: str, epoch: int, reason: str, now_s: float
    ) -> list[Action]:
        """The node revoked the lease; a revocation of an older one changes nothing."""
        lease = self._held(stream, replica, epoch)
        return [] if lease is None else [self._revoke(lease, reason, "node", now_s)]

    def revoke(self, replica: str, reason: str, now_s: float) -> tuple[Lease, list[Action]] | None:
        """An operator ends the lease at once; None when there is none."""
        lease = self._book.live(replica, now_s)
        if lease is None:
            return None
        told = Command(self._stream_of[replica], release_command(lease, reason))
        return lease, [told, self._revoke(lease, reason, "operator", now_s)]

    def lapsed(self, replicas: Sequence[str]) -> list[Action]:
        """The node fell silent for longer than its offers lived, and is back.

        Its lease may have run out there while it lives here: only a new epoch is believed again.
        """
        over = [lease for lease in self._book.leases() if lease.replica in replicas]
        for lease in over:
            self._book.revoke(lease.replica, lease.epoch)
        return [LogRecord("lease_expired", _fields(lease)) for lease in over]

    def lost(self, stream: int) -> list[Action]:
        """The stream of these leases is over, and they are with it."""
        over = [lease for lease in self._book.leases() if self._stream_of[lease.replica] == stream]
        for lease in over:
            self._book.revoke(lease.replica, lease.epoch)
        self._stream_of = {n: each for n, each in self._stream_of.items() if each != stream}
        return [
            LogRecord("lease_released", {**_fields(lease), "reason": "node lost"}) for lease in over
        ]

    def _held(self, stream: int, replica: str, epoch: int) -> Lease | None:
        return self._current(replica, epoch) if self._stream_of.get(replica) == stream else None

    def _current(self, replica: str, epoch: int) -> Lease | None:
        for lease in self._book.leases():
            if lease.replica == replica and lease.epoch == epoch:
                return lease
        return None

    def _release(self, lease: Lease, reason: str, now_s: float) -> list[Action]:
        self._book.begin_release(lease.replica, lease.epoch, now_s)
        return [
            Command(self._stream_of[lease.replica], release_command(lease, reason)),
            LogRecord("lease_releasing", {**_fields(lease), "reason": reason}),
        ]

    def _renew(self, lease: Lease, now_s: float) -> list[Action]:
        granted_s = lease.expires_s - self._times.ttl_s
        if now_s < granted_s + self._times.renew_s:
            return []
        renewed = self._book.renew(lease.replica, lease.epoch, now_s)
        told = lease_command(renewed, self._times.ttl_s)
        return [Command(self._stream_of[lease.replica], told)]

    def _apart(self, replica: str, act: Callable[[], list[Action]], now_s: float) -> list[Action]:
        """Do something for one replica; whatever is wrong with it, the others have their leases."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - one replica must not end all; it rests
            for lease in self._book.leases():
                if lease.replica == replica:
                    self._book.revoke(replica, lease.epoch)
            self._promises.pop(replica, None)
            self._not_before_s[replica] = now_s + BROKEN_PAUSE_S
            return [LogRecord("replica_broken", {"replica": replica, "message": repr(error)[:200]})]

    def _decide(
        self, job: str, step: int, plan: HarvestPlan, offers: Mapping[str, Offer], now_s: float
    ) -> tuple[Decision, list[Action]]:
        """Ask the policy. One that breaks is asked again later, and until then nothing changes."""
        held = self._held_now(plan.renew, offers, now_s)
        promised = tuple(
            Holding(each.move.job, offers[name], each.since_s)
            for name, each in self._promises.items()
            if name in offers
        )
        free = tuple(
            offer
            for offer in plan.lease
            if now_s >= self._not_before_s.get(offer.replica, now_s)
            and offer.replica not in self._promises
        )
        nothing = Decision((), ())
        if now_s < self._policy_rests_until_s:
            return nothing, []
        try:
            jobs = (self._demand.demand(job, step, now_s),)
            return self._policy.decide(Situation(now_s, free, held + promised, jobs)), []
        except Exception as error:  # noqa: BLE001 - a broken policy must not end live leases
            self._policy_rests_until_s = now_s + BROKEN_PAUSE_S
            return nothing, [LogRecord("policy_broken", {"message": repr(error)[:200]})]

    def _forget_past(self, now_s: float) -> None:
        self._not_before_s = {n: at_s for n, at_s in self._not_before_s.items() if now_s < at_s}
        self._switched = {n: e for n, e in self._switched.items() if n in self._holdings}

    def _keep_promises(
        self, offers: Mapping[str, Offer], fleet: Fleet, now_s: float
    ) -> list[Action]:
        """Grant what was decided, once its epoch is durable and if it still may be."""
        actions: list[Action] = []
        due = [n for n, each in self._promises.items() if self._book.reserved(n, each.epoch - 1)]
        plan = self._allowed.plan(offers.values(), self._book.leases()) if due else None
        free = {offer.replica: offer for offer in plan.lease} if plan else {}
        for name in due:
            promise = self._promises.pop(name)
            if name in free and now_s >= self._not_before_s.get(name, now_s):
                take = partial(self._take, promise.move, free, fleet, now_s)
                actions += self._apart(name, take, now_s)
        return actions

    def _take(
        self, move: Move, offers: Mapping[str, Offer], fleet: Fleet, now_s: float
    ) -> list[Action]:
        """Grant under an epoch that is durable; without one, have the next one made so."""
        offer = offers[move.replica]
        if self._book.reserved(offer.replica, offer.epoch):
            return self._grant(move, offer, fleet, now_s)
        if len(self._promises) >= MAX_PROMISES:
            return []
        try:
            epoch = self._book.proposed(offer.replica, offer.epoch)
        except LeaseError as error:
            self._not_before_s[offer.replica] = now_s + BROKEN_PAUSE_S
            return [LogRecord("lease_refused", {"replica": offer.replica, "reason": str(error)})]
        self._promises[offer.replica] = _Promise(move, epoch, now_s)
        # An epoch that a node saw must never be handed out again.
        return [Reserve(save_epoch(offer.replica, epoch), EpochReserved(offer.replica, epoch))]

    def _give_back(self, move: Move, now_s: float) -> list[Action]:
        self._note("give back", move, now_s)
        if self._promises.pop(move.replica, None) is not None:
            return []
        lease = self._book.live(move.replica, now_s)
        return [] if lease is None else self._release(lease, move.why, now_s)

    def _grant(self, move: Move, offer: Offer, fleet: Fleet, now_s: float) -> list[Action]:
        view = fleet.of_replica(offer.replica)
        if view is None:
            return []
        lease = self._book.grant(move.job, offer.replica, now_s, seen_epoch=offer.epoch)
        self._stream_of[offer.replica] = view.stream
        self._holdings[offer.replica] = Holding(move.job, offer, now_s)
        self._healths.leased(offer.replica, lease.epoch)
        self._note("lease", move, now_s)
        fields = {**_fields(lease), "node": view.node, "kind": offer.kind.value, "why": move.why}
        return [
            Command(view.stream, lease_command(lease, self._times.ttl_s)),
            LogRecord("lease_granted", fields, move.figures),
        ]

    def _revoke(self, lease: Lease, reason: str, by: str, now_s: float) -> LogRecord:
        self._book.revoke(lease.replica, lease.epoch)
        self._not_before_s[lease.replica] = now_s + self._times.cooldown_s
        self._log.note(lease.replica, Reason(now_s, "revoked", f"{by}: {reason}"))
        holding = self._holdings.pop(lease.replica, None)
        if holding is not None and by == "node":
            guests = [h for h in self._holdings.values() if h.offer.kind is ReplicaKind.GUEST]
            self._policy.revoked(holding, len(guests) + 1, now_s)
        return LogRecord("revoked", {**_fields(lease), "reason": reason, "by": by})


def _fields(lease: Lease) -> dict[str, object]:
    return {"replica": lease.replica, "epoch": lease.epoch, "job": lease.job}


def replica_rows(
    fleet: Fleet, leasing: Leasing, healths: HealthBook, now_s: float
) -> list[pb.Replica]:
    """One row for each live offer, by replica id."""
    return [_row(offer, leasing, healths, now_s) for offer in fleet.live_offers(now_s)]


def _row(offer: Offer, leasing: Leasing, healths: HealthBook, now_s: float) -> pb.Replica:
    lease = leasing.active(offer.replica, now_s)
    return pb.Replica(
        id=offer.replica,
        kind=KIND_TO[offer.kind],
        url=offer.url,
        node=offer.node,
        leased=lease is not None,
        lease_epoch=lease.epoch if lease else 0,
        policy_version=offer.policy_version,
        max_sequences=offer.max_sequences,
        healthy=healths.takes_turns(offer.replica),
        job=lease.job if lease else "",
        kv_tokens=offer.kv_tokens,
        decode_tok_s=offer.decode_tok_s,
        prefill_tok_s=offer.prefill_tok_s,
    )


def snapshot(
    fleet: Fleet,
    leasing: Leasing,
    healths: HealthBook,
    chain: VersionRegistry,
    policy: HarvestModes,
    demand: DemandBook,
    now_s: float,
) -> pb.SnapshotReply:
    """Everything an operator may ask about."""
    told = [view.telemetry for view in fleet.nodes]
    jobs = [chain.job] if chain.job else []
    return pb.SnapshotReply(
        replicas=replica_rows(fleet, leasing, healths, now_s),
        leases=[
            pb.LeaseView(
                id=lease.id,
                job=lease.job,
                replica=lease.replica,
                epoch=lease.epoch,
                expires_in_s=max(0.0, lease.expires_s - now_s),
                state=lease.state.value,
                why="".join(reason.why for reason in leasing.explained(lease.replica)[-1:]),
            )
            for lease in leasing.leases()
        ],
        hosts=[telemetry.host for telemetry in told if telemetry.HasField("host")],
        guests=[guest for telemetry in told for guest in telemetry.guests],
        harvest=MODE_TO[policy.mode],
        latest_version=chain.latest,
        jobs=[_job(job, chain.latest, demand.figures(job.job, now_s)) for job in jobs],
        overrides=[
            pb.HarvestOverride(replica=replica, mode=MODE_TO[mode])
            for replica, mode in sorted(policy.overrides.items())
        ],
    )


def _job(job: JobRecord, latest: int, demand: JobFigures | None) -> pb.JobView:
    view = pb.JobView(job=job.job, latest_version=latest, max_staleness=job.max_staleness)
    if demand is not None:
        view.demand_known = True
        view.turns = demand.turns
        view.owed_tokens = demand.owed_tokens
        view.made_tok_s = demand.made_tok_s
    return view

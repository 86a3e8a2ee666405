"""Leasing: decides leases from offers, modes and time, commands the nodes, and publishes the table.

Gateways get the table on every change, operators a snapshot on request.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from elastic_scheduler import (
    HarvestPlan,
    Holding,
    JobDemand,
    Lease,
    LeaseDecision,
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
    SwitchKind,
    make_policy,
)
from elastic_scheduler.capacity import CapacityGate
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import DemandBook, Switched
from rose.scheduler.core.fleet import FleetBook, HealthBook
from rose.scheduler.core.job_registry import JobRegistry
from rose.scheduler.core.messages import (
    Action,
    Command,
    EpochReserved,
    Held,
    LogRecord,
    ReplicaDrained,
    Reserve,
    TakenBack,
)
from rose.scheduler.core.quotas import QuotaBook
from rose.scheduler.persistence import Saved, save_epoch
from rose.scheduler.wire import lease_command, release_command

GUEST = ReplicaKind.GUEST
# A leased replica may miss turns this long, to catch up with a version, before others are sought.
HELPLESS_S = 15.0
# From a lease to its first token: an engine that takes longer has failed.
MAX_SWITCH_S = 600.0
# A gateway may have measured from a little before the grant, by its clock.
SWITCH_SLACK_S = 5.0
MAX_PROMISES = 4_096
# After a new leader began, leases of the one before live for less than that without it: it was sure
# of its own lead until 0.2 s before, and a node's lease lives for 5 s.
SETTLE_S = 5.0
# Pause before a retry, so that a fault neither ends other leases nor fills a disk.
BROKEN_PAUSE_S = 30.0
# A fleet of so many replicas is regulated whole, and its table made, at every event.
SMALL_FLEET = 64
# A larger one no more often than this: events meanwhile are news for the next time. Leases
# expire, end and are granted at every event all the same, and are renewed nearly so.
PACE_S = 0.25
RENEW_PACE_S = 0.25
# With the renewals that are due for a node go those that would be within this share of the period.
EARLY_SHARE = 0.6
# A policy is asked no less often.
WHOLE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Promise:
    """Decision to lease a replica, which waits for the lease's epoch to be durable."""

    move: Move
    epoch: int
    since_s: float


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Times of a lease in seconds: life without a renewal, renewal period, pause after a revoke."""

    ttl_s: float = 5.0
    renew_s: float = 1.0
    cooldown_s: float = 1.0


class Leasing:
    """Leases of the attached nodes' replicas: grants, renewals, releases, and their commands.

    decided --> promised --(its epoch is durable)--> granted

    A lease belongs to the stream that its command was sent on. An error for one replica, or in the
    policy, is logged and pauses that one alone for 30 s.
    """

    def __init__(
        self,
        times: LeaseTimes,
        saved: Saved,
        allowed: CapacityGate,
        fleet: FleetBook,
        healths: HealthBook,
        jobs: JobRegistry,
        demand: DemandBook,
        quotas: QuotaBook,
        policy: Policy | None = None,
    ) -> None:
        """Begin without live leases. saved: epochs and their jobs, stored by earlier leaders."""
        self._times = times
        self._allowed = allowed
        self._fleet, self._jobs = fleet, jobs
        self._healths = healths
        self._demand = demand
        self._quotas = quotas
        self._policy = policy or make_policy("rose")
        self._log: ReasonLog[Reason] = ReasonLog()
        # Time at which each lease began, and its replica's newest offer: input of the policy.
        self._holdings: dict[str, Holding] = {}
        self._helped_s: dict[str, float] = {}
        self._switched: dict[str, int] = {}
        self._switches: dict[str, SwitchKind] = {}
        self._book = LeaseTable(times.ttl_s, saved.epochs, saved.epoch_floor)
        # Time and live offers of the event that is regulated now.
        self._now_s = 0.0
        self._offers: Mapping[str, Offer] = {}
        self._stream_of: dict[str, int] = {}
        self._not_before_s: dict[str, float] = {}
        self._promises: dict[str, _Promise] = {}
        self._durable: list[str] = []
        # News since `_regulated_s`, and the leases that may be renewed until the next time.
        self._news = True
        self._seen = (0, 0)
        self._regulated_s = -math.inf
        self._kept: tuple[str, ...] = ()
        self._renewed_s = -math.inf
        self._policy_rests_until_s = 0.0
        # Replicas of which nothing was heard since this leader began; their leases may live.
        self._unheard = dict(saved.epoch_jobs)
        self._settles_s: float | None = None

    def believes(self, offer: Offer) -> bool:
        """Return True if an offer's epoch is plausible: at most 2^20 ahead of the store."""
        return self._book.believes(offer.replica, offer.epoch)

    def reserved(self, replica: str, epoch: int) -> list[Action]:
        """Record that an epoch is durable: `regulate` grants its lease. Return no actions."""
        self._book.reserve(replica, epoch)
        self._durable.append(replica)
        return []

    def settling(self, now_s: float) -> bool:
        """Return True while leases of the previous leader may live that no node has reported yet.

        This is so for 5 s at most after the first call.
        """
        if self._settles_s is None:
            self._settles_s = now_s + SETTLE_S
        return bool(self._unheard) and now_s < self._settles_s

    def adopt(
        self,
        stream: int,
        offers: Iterable[Offer],
        held: Iterable[Held],
        live: Collection[str],
        now_s: float,
    ) -> list[Action]:
        """Adopt the leases that nodes hold from the previous leader; return commands and log
        records.

        A replica's lease is adopted only in the first report about the replica, if it is the newest
        epoch of a job in `live`; otherwise the node is told to release it. held: leases that the
        node reports.
        """
        actions: list[Action] = []
        holds = {each.replica: each for each in held}
        for offer in offers:
            holder, each = self._unheard.pop(offer.replica, None), holds.get(offer.replica)
            if holder is None or each is None or self._book.live(offer.replica, now_s):
                continue
            lease = Lease(each.job, each.replica, each.epoch, now_s + each.left_s)
            if each.left_s > 0 and each.job == holder and holder in live:
                with suppress(LeaseError):
                    lease = self._book.adopt(holder, each.replica, each.epoch, each.left_s, now_s)
                    self._stream_of[each.replica] = stream
                    self._healths.leased(each.replica, each.epoch)
                    actions.append(LogRecord("lease_adopted", _fields(lease)))
                    continue
            actions.append(Command(stream, release_command(lease, "a lease that nobody granted")))
        return actions

    @property
    def promised(self) -> int:
        """Number of leases that are decided and wait for their epochs to be durable."""
        return len(self._promises)

    def leases(self) -> tuple[Lease, ...]:
        """Return all leases that have not ended, those being released included."""
        return self._book.leases()

    def leased_to(self, replica: str) -> str:
        """Return the job that has a lease of the replica, "" if there is none."""
        lease = self._book.held(replica)
        return lease.job if lease is not None else ""

    def active(self, replica: str, now_s: float) -> Lease | None:
        """Return the lease under which turns may be sent to the replica, None if there is none."""
        lease = self._book.live(replica, now_s)
        return lease if lease is not None and lease.state is LeaseState.ACTIVE else None

    def regulate(self, now_s: float, *, news: bool = True, at_once: bool = False) -> list[Action]:
        """Expire, grant, release and renew leases; return commands, epoch reservations and log
        records.

        news: an event changed something besides offers, verdicts and time, which are compared here.
        at_once: decide now; otherwise a fleet of more than 64 replicas is decided every 0.25 s at
        most.
        """
        self._now_s, self._offers = now_s, self._fleet.live_offers(now_s)
        # First of all: after a pause of this process no lease may outlive its time by a renewal.
        actions: list[Action] = [
            LogRecord("lease_expired", _fields(lease)) for lease in self._book.expire(now_s)
        ]
        actions += self._keep_promises()
        seen = self._fleet.revision, self._allowed.judgements
        at_once |= self._fleet.size <= SMALL_FLEET or seen[1] != self._seen[1]
        self._news |= news or bool(actions) or seen != self._seen
        self._seen = seen
        if not (at_once or self._is_due()):
            if now_s >= self._renewed_s + RENEW_PACE_S:
                actions += self._renew_all(self._kept)
            return actions
        self._news, self._regulated_s = False, now_s
        return actions + self._regulate_whole()

    def _is_due(self) -> bool:
        since_s = self._now_s - self._regulated_s
        if since_s < PACE_S:
            return False
        rested = any(self._now_s >= at_s for at_s in self._not_before_s.values())
        return self._news or rested or since_s >= WHOLE_S

    def _regulate_whole(self) -> list[Action]:
        actions: list[Action] = []
        plan = self._allowed.plan(self._offers.values(), self._book.leases())
        over = [(lease, "harvest") for lease in plan.release] + self._undue(plan.renew)
        over += [(lease, "more guests than a policy allows") for lease in plan.beyond]
        ended = {lease.replica for lease, _ in over}
        plan = replace(plan, renew=tuple(e for e in plan.renew if e.replica not in ended))
        for lease, why in over:
            actions += self._apart(lease.replica, self._release, lease, why)
        self._kept = tuple(lease.replica for lease in plan.renew)
        actions += self._renew_all(self._kept)
        if not self._jobs.live or (len(self._jobs.live) > 1 and self.settling(self._now_s)):
            # No job's share is known until the holdings of all jobs are known.
            return actions
        self._forget_past()
        decision, broken = self._decide(plan)
        actions += broken
        for move in self._within_quotas(decision.take):
            actions += self._apart(move.replica, self._take, move)
        for move in decision.give_back:
            actions += self._apart(move.replica, self._give_back, move)
        return actions

    def switched(
        self, switches: Iterable[Switched], now_s: float
    ) -> tuple[list[Action], list[str]]:
        """Record seconds from lease to first token for the policy, once for each live lease.

        Return log records, and a reason for each duration refused because it is longer than its
        lease.
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
            switch = self._switches.get(each.replica, SwitchKind.NONE)
            self._policy.switched(holding.offer, each.took_s, switch)
            fields = {**_fields(lease), "took_s": each.took_s, "switch": switch.value}
            actions.append(LogRecord("first_token", fields))
        return actions, refused

    def explained(self, replica: str) -> tuple[Reason, ...]:
        """Return the reasons of the replica's latest leases and releases, oldest first."""
        return self._log.of(replica)

    def _held_now(self, leases: Sequence[Lease]) -> tuple[Holding, ...]:
        """Return holdings that count as capacity: those able to take turns in the last 15 s."""
        self._holdings = {
            lease.replica: self._holding(lease, self._offers[lease.replica]) for lease in leases
        }
        self._helped_s = {
            name: self._now_s
            if self._healths.takes_turns(name, each.job)
            else self._helped_s.get(name, each.since_s)
            for name, each in self._holdings.items()
        }
        return tuple(
            each
            for name, each in self._holdings.items()
            if self._now_s < max(each.since_s, self._helped_s[name]) + HELPLESS_S
        )

    def _holding(self, lease: Lease, offer: Offer) -> Holding:
        before = self._holdings.get(lease.replica)
        if before is None:
            return Holding(lease.job, offer, lease.expires_s - self._times.ttl_s)
        if before.offer is offer and before.job == lease.job:
            return before
        return Holding(lease.job, offer, before.since_s)

    def _note(self, what: str, move: Move) -> None:
        self._log.note(move.replica, Reason(self._now_s, what, move.why, dict(move.figures)))

    def drained(self, event: ReplicaDrained) -> list[Action]:
        """End a lease that the node reports as drained; return log records.

        A report about an older epoch, or from another stream, changes nothing and returns an empty
        list.
        """
        lease = self._held(event)
        if lease is None:
            return []
        self._book.released(lease.replica, lease.epoch)
        return [LogRecord("lease_released", {**_fields(lease), "reason": "drained"})]

    def taken_back(self, event: TakenBack, now_s: float) -> list[Action]:
        """End a lease that its node revoked; return log records.

        A report about an older epoch, or from another stream, changes nothing and returns an empty
        list.
        """
        lease = self._held(event)
        return [] if lease is None else [self._revoke(lease, event.reason, "node", now_s)]

    def revoke(self, replica: str, reason: str, now_s: float) -> tuple[Lease, list[Action]] | None:
        """End a replica's lease for an operator; return it with commands and records, None without
        one.
        """
        lease = self._book.live(replica, now_s)
        if lease is None:
            return None
        told = Command(self._stream_of[replica], release_command(lease, reason))
        return lease, [told, self._revoke(lease, reason, "operator", now_s)]

    def lapsed(self, replicas: Sequence[str]) -> list[Action]:
        """End the leases of replicas whose offers expired before their node reported again.

        Return log records. The node may have ended the lease meanwhile, so only a new epoch is
        valid.
        """
        held = (self._book.held(replica) for replica in dict.fromkeys(replicas))
        over = [lease for lease in held if lease is not None]
        for lease in over:
            self._book.revoke(lease.replica, lease.epoch)
        return [LogRecord("lease_expired", _fields(lease)) for lease in over]

    def lost(self, stream: int) -> list[Action]:
        """End all leases granted on a node's stream that closed; return log records."""
        over = [lease for lease in self._book.leases() if self._stream_of[lease.replica] == stream]
        for lease in over:
            self._book.revoke(lease.replica, lease.epoch)
        self._stream_of = {n: each for n, each in self._stream_of.items() if each != stream}
        return [
            LogRecord("lease_released", {**_fields(lease), "reason": "node lost"}) for lease in over
        ]

    def _held(self, event: ReplicaDrained | TakenBack) -> Lease | None:
        of_stream = self._stream_of.get(event.replica) == event.stream
        return self._current(event.replica, event.epoch) if of_stream else None

    def _current(self, replica: str, epoch: int) -> Lease | None:
        lease = self._book.held(replica)
        return lease if lease is not None and lease.epoch == epoch else None

    def _release(self, lease: Lease, reason: str) -> list[Action]:
        self._book.begin_release(lease.replica, lease.epoch, self._now_s)
        return [
            Command(self._stream_of[lease.replica], release_command(lease, reason)),
            LogRecord("lease_releasing", {**_fields(lease), "reason": reason}),
        ]

    def _renew_all(self, replicas: Iterable[str]) -> list[Action]:
        """Return renewals of the leases that are due; a lease without a live offer is left to
        expire.

        If a node accepts renewals together, one due lease also renews those due soon on that node.
        """
        self._renewed_s = self._now_s
        due_s = self._now_s + self._times.ttl_s - self._times.renew_s
        soon_s = due_s + self._times.renew_s * EARLY_SHARE
        soon: list[Lease] = []
        due: set[int] = set()
        for replica in replicas:
            lease = self._book.held(replica)
            if lease is None or lease.expires_s > soon_s or replica not in self._offers:
                continue
            if lease.state is LeaseState.ACTIVE:
                soon.append(lease)
                if lease.expires_s <= due_s:
                    due.add(self._stream_of[replica])
        together = {stream for stream in due if self._fleet.takes_renewals(stream)}
        actions: list[Action] = []
        for lease in soon:
            if lease.expires_s <= due_s or self._stream_of[lease.replica] in together:
                actions += self._apart(lease.replica, self._renew, lease)
        return _bundled(actions, together)

    def _renew(self, lease: Lease) -> list[Action]:
        renewed = self._book.renew(lease.replica, lease.epoch, self._now_s)
        return [Command(self._stream_of[lease.replica], self._told(renewed))]

    def _told(self, lease: Lease) -> pb.NodeCommand:
        job = self._jobs.get(lease.job)
        model = job.model if job else ""
        return lease_command(lease, self._times.ttl_s, model, self._jobs.chain(lease.job).latest)

    def _undue(self, leases: Iterable[Lease]) -> list[tuple[Lease, str]]:
        """Return leases to end, with reasons: of ended jobs, and the newest beyond a quota."""
        live = {job.job: job for job in self._jobs.live}
        guests: dict[str, list[Lease]] = {}
        undue: list[tuple[Lease, str]] = []
        for lease in leases:
            if lease.job not in live:
                undue.append((lease, "the job was ended"))
            elif self._offers[lease.replica].kind is not ReplicaKind.GUEST:
                continue
            elif live[lease.job].standing:
                undue.append((lease, "no trainer has registered the job"))
            else:
                guests.setdefault(lease.job, []).append(lease)
        for name, held in guests.items():
            most = self._quotas.most(live[name], len(held), self._now_s)
            if most < len(held):
                held.sort(key=lambda lease: self._since_s(lease))
                beyond = held[int(most) :]
                undue += [(lease, "more guests than the job's quota") for lease in beyond]
        return undue

    def _since_s(self, lease: Lease) -> float:
        holding = self._holdings.get(lease.replica)
        return holding.since_s if holding else lease.expires_s

    def _within_quotas(self, moves: Sequence[Move]) -> list[Move]:
        """Return the moves without guests beyond a job's quota or unable to run its model."""
        if not moves:
            return []
        guests = Counter(
            job
            for replica, job in [
                *((lease.replica, lease.job) for lease in self._book.leases()),
                *((name, each.move.job) for name, each in self._promises.items()),
            ]
            if replica in self._offers and self._offers[replica].kind is ReplicaKind.GUEST
        )
        kept = []
        for move in moves:
            job, offer = self._jobs.get(move.job), self._offers.get(move.replica)
            if job is None or (offer is not None and not offer.serves(job.model)):
                continue
            if offer is not None and offer.kind is ReplicaKind.GUEST:
                # A host lends to training, not to a name that an operator has written down.
                if guests[job.job] >= self._quotas.most(job, guests[job.job], self._now_s):
                    continue
                guests[job.job] += 1
            kept.append(move)
        return kept

    def _demands(self) -> tuple[JobDemand, ...]:
        alone = self._jobs.only is not None
        guests = Counter(h.job for h in self._holdings.values() if h.offer.kind is GUEST)
        return tuple(
            replace(
                self._demand.demand(
                    job.job, self._jobs.chain(job.job).latest, self._now_s, alone=alone
                ),
                weight=job.weight * self._allowed.weight_of(job.job),
                model=job.model,
                max_guests=self._quotas.most(job, guests[job.job], self._now_s),
            )
            for job in self._jobs.live
        )

    def _apart(
        self, replica: str, act: Callable[..., list[Action]], *about: object
    ) -> list[Action]:
        """Return the actions of `act(*about)`; if it raises, end this replica's lease and log that.

        The replica then gets no lease for 30 s. Other replicas are not affected.
        """
        try:
            return act(*about)
        except Exception as error:  # noqa: BLE001 - one replica must not end all; it rests
            lease = self._book.held(replica)
            if lease is not None:
                self._book.revoke(replica, lease.epoch)
            self._promises.pop(replica, None)
            self._not_before_s[replica] = self._now_s + BROKEN_PAUSE_S
            return [LogRecord("replica_broken", {"replica": replica, "message": repr(error)[:200]})]

    def _decide(self, plan: HarvestPlan) -> tuple[LeaseDecision, list[Action]]:
        """Return the policy's decision and log records; a policy that raises decides nothing for 30
        s.
        """
        held = self._held_now(plan.renew)
        promised = tuple(
            Holding(each.move.job, self._offers[name], each.since_s)
            for name, each in self._promises.items()
            if name in self._offers
        )
        free = tuple(
            offer
            for offer in plan.lease
            if self._is_rested(offer.replica) and offer.replica not in self._promises
        )
        nothing = LeaseDecision((), ())
        if self._now_s < self._policy_rests_until_s:
            return nothing, []
        try:
            situation = Situation(self._now_s, free, held + promised, self._demands())
            return self._policy.decide(situation), []
        except Exception as error:  # noqa: BLE001 - a broken policy must not end live leases
            self._policy_rests_until_s = self._now_s + BROKEN_PAUSE_S
            return nothing, [LogRecord("policy_broken", {"message": repr(error)[:200]})]

    def _is_rested(self, replica: str) -> bool:
        return self._now_s >= self._not_before_s.get(replica, self._now_s)

    def _forget_past(self) -> None:
        resting = self._not_before_s.items()
        self._not_before_s = {n: at_s for n, at_s in resting if self._now_s < at_s}
        self._switched = {n: e for n, e in self._switched.items() if n in self._holdings}
        self._switches = {n: each for n, each in self._switches.items() if n in self._holdings}

    def _keep_promises(self) -> list[Action]:
        """Return grants of decided leases whose epochs became durable, if still allowed."""
        actions: list[Action] = []
        durable, self._durable = self._durable, []
        for name in durable:
            promise = self._promises.get(name)
            if promise is None or not self._book.reserved(name, promise.epoch - 1):
                continue
            del self._promises[name]
            offer = self._offers.get(name)
            is_free = self._book.held(name) is None and self._is_rested(name)
            is_live = self._jobs.get(promise.move.job) is not None
            if is_live and is_free and offer is not None and self._allowed.may_lease(offer):
                actions += self._apart(name, self._take, promise.move)
        return actions

    def _take(self, move: Move) -> list[Action]:
        """Return the grant of a lease, or the reservation of its epoch if none is durable."""
        offer = self._offers[move.replica]
        if not self._has_room(move.job, offer):
            return []
        if self._book.reserved(offer.replica, offer.epoch):
            return self._grant(move, offer)
        if len(self._promises) >= MAX_PROMISES:
            return []
        try:
            epoch = self._book.proposed(offer.replica, offer.epoch)
        except LeaseError as error:
            self._not_before_s[offer.replica] = self._now_s + BROKEN_PAUSE_S
            return [LogRecord("lease_refused", {"replica": offer.replica, "reason": str(error)})]
        self._promises[offer.replica] = _Promise(move, epoch, self._now_s)
        # An epoch that a node saw must never be handed out again.
        write = save_epoch(offer.replica, epoch, move.job, offer.node, self._allowed.wall_s)
        return [Reserve(write, EpochReserved(offer.replica, epoch))]

    def _has_room(self, job: str, offer: Offer) -> bool:
        """Return True if the policies' quotas allow the job one more guest."""
        # Looked at where a quota holds: this is asked of every replica that is leased.
        held = ((h.job, h.offer.node) for h in self._holdings.values() if h.offer.kind is GUEST)
        return self._allowed.admits(job, offer, held)

    def _give_back(self, move: Move) -> list[Action]:
        self._note("give back", move)
        if self._promises.pop(move.replica, None) is not None:
            return []
        lease = self._book.live(move.replica, self._now_s)
        return [] if lease is None else self._release(lease, move.why)

    def _grant(self, move: Move, offer: Offer) -> list[Action]:
        # Another node may still have a stale offer of the replica.
        view = self._fleet.of_node(offer.node)
        if view is None or offer.replica not in view.offers:
            return []
        lease = self._book.grant(move.job, offer.replica, self._now_s, seen_epoch=offer.epoch)
        self._stream_of[offer.replica] = view.stream
        self._holdings[offer.replica] = Holding(move.job, offer, self._now_s)
        self._healths.leased(offer.replica, lease.epoch)
        job = self._jobs.get(move.job)
        switch = offer.switch_to(move.job, job.model if job else "")
        self._switches[offer.replica] = switch
        self._note("lease", move)
        fields = {**_fields(lease), "node": view.node, "kind": offer.kind.value, "why": move.why}
        if switch is not SwitchKind.NONE:
            fields["switch"] = switch.value
        return [
            Command(view.stream, self._told(lease)),
            LogRecord("lease_granted", fields, move.figures),
        ]

    def _revoke(self, lease: Lease, reason: str, by: str, now_s: float) -> LogRecord:
        self._book.revoke(lease.replica, lease.epoch)
        holding = self._holdings.pop(lease.replica, None)
        pause_s = self._allowed.cooldown_s(holding.offer.node) if holding is not None else 0.0
        self._not_before_s[lease.replica] = now_s + max(self._times.cooldown_s, pause_s)
        self._log.note(lease.replica, Reason(now_s, "revoked", f"{by}: {reason}"))
        if holding is not None and by == "node":
            guests = [h for h in self._holdings.values() if h.offer.kind is ReplicaKind.GUEST]
            self._policy.revoked(holding, len(guests) + 1, now_s)
        return LogRecord("revoked", {**_fields(lease), "reason": reason, "by": by})


def _bundled(actions: Iterable[Action], together: Collection[int]) -> list[Action]:
    """Return the actions; all renewals of a stream in `together` become one command."""
    renewals: dict[int, pb.Renewals] = {}
    kept: list[Action] = []
    for action in actions:
        if not isinstance(action, Command) or action.stream not in together:
            kept.append(action)
        elif action.stream in renewals:
            renewals[action.stream].leases.append(action.command.lease)
        else:
            command = pb.NodeCommand(renewals=pb.Renewals(leases=[action.command.lease]))
            renewals[action.stream] = command.renewals
            kept.append(Command(action.stream, command))
    return kept


def _fields(lease: Lease) -> dict[str, object]:
    return {"replica": lease.replica, "epoch": lease.epoch, "job": lease.job}

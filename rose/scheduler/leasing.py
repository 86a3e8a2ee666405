"""Leases as they follow from offers, modes and time, and the commands that tell the nodes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_scheduler import (
    HarvestPolicy,
    Holding,
    Lease,
    LeaseBook,
    LeaseState,
    Move,
    Offer,
    Policy,
    Reason,
    ReasonLog,
    ReplicaKind,
    Situation,
    make_policy,
)
from rose.scheduler.demand import DemandBook, Switched
from rose.scheduler.fleet import Fleet
from rose.scheduler.health_book import HealthBook
from rose.scheduler.messages import Action, Command, Record
from rose.scheduler.saved import save_epoch
from rose.scheduler.versions import VersionChain
from rose.scheduler.wire import lease_command, release_command

# A leased replica may miss turns this long, to catch up with a version, before others are sought.
HELPLESS_S = 15.0


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """How long a lease lives unrenewed, how often it is renewed, and the pause after a revoke."""

    ttl_s: float = 5.0
    renew_s: float = 1.0
    cooldown_s: float = 1.0


class Leasing:
    """The lease book of attached nodes. A lease belongs to the stream that it was sent on."""

    def __init__(
        self,
        times: LeaseTimes,
        epochs: Mapping[str, int],
        allowed: HarvestPolicy,
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
        self._book = LeaseBook(times.ttl_s, epochs)
        self._stream_of: dict[str, int] = {}
        self._not_before_s: dict[str, float] = {}

    def leases(self) -> tuple[Lease, ...]:
        """All leases that were not ended."""
        return self._book.leases()

    def active(self, replica: str, now_s: float) -> Lease | None:
        """The lease under which turns may be sent to the replica."""
        lease = self._book.live(replica, now_s)
        return lease if lease is not None and lease.state is LeaseState.ACTIVE else None

    def regulate(self, chain: VersionChain, fleet: Fleet, now_s: float) -> list[Action]:
        """Expire, release, renew and grant what is due: what the operator allows, as decided."""
        # First of all: after a pause of this process no lease may outlive its time by a renewal.
        actions: list[Action] = [
            Record("lease_expired", _fields(lease)) for lease in self._book.expire(now_s)
        ]
        offers = {offer.replica: offer for offer in fleet.live_offers(now_s)}
        plan = self._allowed.plan(offers.values(), self._book.leases())
        for lease in plan.release:
            actions += self._release(lease, "harvest", now_s)
        for lease in plan.renew:
            actions += self._renew(lease, now_s)
        if chain.job is None:
            return actions
        held = self._held_now(plan.renew, offers, now_s)
        free = tuple(o for o in plan.lease if now_s >= self._not_before_s.get(o.replica, now_s))
        jobs = (self._demand.demand(chain.job.job, chain.latest, now_s),)
        decision = self._policy.decide(Situation(now_s, free, held, jobs))
        for move in decision.take:
            actions += self._grant(move, offers[move.replica], fleet, now_s)
        leases = {lease.replica: lease for lease in plan.renew}
        for move in decision.give_back:
            self._note("give back", move, now_s)
            actions += self._release(leases[move.replica], move.why, now_s)
        return actions

    def switched(self, switches: Iterable[Switched]) -> list[Action]:
        """First tokens under leases that live: what a switch costs. Each lease has one."""
        actions: list[Action] = []
        for each in switches:
            holding = self._holdings.get(each.replica)
            lease = self._current(each.replica, each.epoch)
            known = self._switched.get(each.replica) == each.epoch
            if lease is None or holding is None or known or not 0 <= each.took_s < math.inf:
                continue
            self._switched[each.replica] = each.epoch
            self._policy.switched(holding.offer, each.took_s)
            actions.append(Record("first_token", {**_fields(lease), "took_s": each.took_s}))
        return actions

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
        return [Record("lease_released", {**_fields(lease), "reason": "drained"})]

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
        return [Record("lease_expired", _fields(lease)) for lease in over]

    def lost(self, stream: int) -> list[Action]:
        """The stream of these leases is over, and they are with it."""
        over = [lease for lease in self._book.leases() if self._stream_of[lease.replica] == stream]
        for lease in over:
            self._book.revoke(lease.replica, lease.epoch)
        return [
            Record("lease_released", {**_fields(lease), "reason": "node lost"}) for lease in over
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
            Record("lease_releasing", {**_fields(lease), "reason": reason}),
        ]

    def _renew(self, lease: Lease, now_s: float) -> list[Action]:
        granted_s = lease.expires_s - self._times.ttl_s
        if now_s < granted_s + self._times.renew_s:
            return []
        renewed = self._book.renew(lease.replica, lease.epoch, now_s)
        told = lease_command(renewed, self._times.ttl_s)
        return [Command(self._stream_of[lease.replica], told)]

    def _grant(self, move: Move, offer: Offer, fleet: Fleet, now_s: float) -> list[Action]:
        view = fleet.of_replica(offer.replica)
        if view is None:
            return []
        lease = self._book.grant(move.job, offer.replica, now_s, seen_epoch=offer.epoch)
        self._stream_of[offer.replica] = view.stream
        self._holdings[offer.replica] = Holding(move.job, offer, now_s)
        self._healths.leased(offer.replica, lease.epoch, now_s)
        self._note("lease", move, now_s)
        fields = {**_fields(lease), "node": view.node, "kind": offer.kind.value, "why": move.why}
        return [
            # Before the command: an epoch that a node saw must never be handed out again.
            save_epoch(lease.replica, lease.epoch),
            Command(view.stream, lease_command(lease, self._times.ttl_s)),
            Record("lease_granted", fields),
        ]

    def _revoke(self, lease: Lease, reason: str, by: str, now_s: float) -> Record:
        self._book.revoke(lease.replica, lease.epoch)
        self._not_before_s[lease.replica] = now_s + self._times.cooldown_s
        self._log.note(lease.replica, Reason(now_s, "revoked", f"{by}: {reason}"))
        holding = self._holdings.pop(lease.replica, None)
        if holding is not None and by == "node":
            guests = [h for h in self._holdings.values() if h.offer.kind is ReplicaKind.GUEST]
            self._policy.revoked(holding, len(guests) + 1, now_s)
        return Record("revoked", {**_fields(lease), "reason": reason, "by": by})


def _fields(lease: Lease) -> dict[str, object]:
    return {"replica": lease.replica, "epoch": lease.epoch, "job": lease.job}

"""ROSE's leasing policy: leases by net benefit."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from elastic_scheduler.leases.lease_table import Offer, ReplicaKind, SwitchKind
from elastic_scheduler.policies.cost_model import (
    FIRST_SWITCHES_S,
    AimdLimit,
    Supply,
    SwitchCosts,
    saved_s,
)
from elastic_scheduler.policies.drf import HOLD_S, FairShares, Supplies, is_poor
from elastic_scheduler.policies.types import Holding, JobDemand, LeaseDecision, Move, Situation

# A guest is taken if it saves more than a switch costs, and returned if it saves less than a
# quarter.
TAKE_ABOVE = 1.0
KEEP_ABOVE = 0.25
# No shorter than trainers usually pause between rounds of rollouts.
LINGER_S = 25.0
MAX_LINGER_S = 600.0
COOLDOWN_S = 10.0
# Expected stay of a replica that was never revoked.
FIRST_TENURE_S = 600.0
REPLICAS_KEPT = 65_536


@dataclass(slots=True)
class _Past:
    """History of a replica between its leases."""

    held_s: float = 0.0
    revokes: int = 0
    useless_since_s: float | None = None
    linger_s: float = field(default_factory=lambda: LINGER_S)
    not_before_s: float = 0.0
    returned_s: float = float("-inf")


class RosePolicy:
    """Takes a guest when the time that it saves exceeds what bringing it up costs.

    `cost_model.saved_s` is the measure, `AimdLimit` the limit after hosts revoked guests, and
    `FairShares` the order of jobs. Dedicated replicas are always leased.

    Against oscillation a guest is given back only when it saves less than a quarter of the gain
    that taking it asked for. That must hold for `LINGER_S` and no less than a switch takes, so
    idling costs at most as much as taking it again would; and for twice as long each time that it
    was wanted again soon after. One replica a job is given back at a time, since the next one's
    worth follows from the rest; it then rests for `COOLDOWN_S`.
    """

    name = "rose"

    def __init__(self, hold_s: float = HOLD_S) -> None:
        """hold_s: time that a replica stays with a job, before another has its turn.

        A shorter one means that switches are cheap here: the default costs shrink in proportion, or
        the first guess alone would hold a replica for minutes.
        """
        cheaper = min(1.0, hold_s / HOLD_S)
        self._costs = SwitchCosts({k: cheaper * cost_s for k, cost_s in FIRST_SWITCHES_S.items()})
        self._fair = FairShares(hold_s)
        self._allowances: dict[str, AimdLimit] = {}
        self._pasts: dict[str, _Past] = {}

    def decide(self, situation: Situation) -> LeaseDecision:
        """Take, in the order of fair shares; give back what saves too little; move for fairness."""
        now_s = situation.now_s
        jobs = [job.cleaned() for job in situation.jobs]
        self._fair.account(jobs, situation.held, now_s)
        take = self._take_all(jobs, situation)
        back = self._give_back(jobs, situation.held, now_s)
        if not take and not back:
            back = self._share(jobs, situation.held, now_s)
        return LeaseDecision(tuple(take), back)

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Halve the job's limit of guests, and remember how long the replica stayed."""
        past = self._past(holding.offer.replica)
        past.revokes += 1
        past.held_s += max(0.0, now_s - holding.since_s)
        past.useless_since_s = None
        if holding.offer.kind is ReplicaKind.GUEST:
            self._allowance(holding.job).revoked(held, now_s)

    def switched(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Take the measured cost for the next decision."""
        self._costs.observe(offer, took_s, switch)

    def _take_all(self, jobs: list[JobDemand], situation: Situation) -> list[Move]:
        """Give out replica after replica, each to the job whose turn it is and that can use it."""
        free = {offer.replica: offer for offer in situation.free}
        if not free:
            return []
        supplies = Supplies([*(each.offer for each in situation.held), *situation.free])
        owned = {job.job: _Owned() for job in jobs}
        for each in situation.held:
            supplies.add(each.job, each.offer)
            if each.job in owned:
                owned[each.job].add(each.offer)
        take: list[Move] = []
        # A replica that was not worth its switch is not worth it beside more replicas either, so a
        # job looks at
        # each replica once.
        ranked = {job.job: iter(_ranked(situation.free, job)) for job in jobs}
        while free:
            order = self._fair.order(jobs, supplies.shares(jobs))
            # A dedicated replica of a job without work is idle while another job has some.
            order.sort(key=lambda job: job.turns <= 0)
            moves = (
                self._take(job, ranked[job.job], free, owned[job.job], situation.now_s)
                for job in order
            )
            move = next((move for move in moves if move is not None), None)
            if move is None:
                break
            take.append(move)
            offer = free.pop(move.replica)
            supplies.add(move.job, offer)
            owned[move.job].add(offer)
        self._fair.give_up(free)
        return take

    def _take(
        self,
        job: JobDemand,
        ranked: Iterator[Offer],
        free: Mapping[str, Offer],
        mine: "_Owned",
        now_s: float,
    ) -> Move | None:
        """Return the best of these replicas for the job, given best first."""
        most = min(job.max_guests, self._allowance(job.job).limit(now_s))
        for offer in ranked:
            if offer.replica not in free or not offer.serves(job.model):
                continue
            if self._fair.meant_for(offer.replica, now_s) not in (None, job.job):
                continue
            past = self._past(offer.replica)
            cost_s = self._cost_s(offer, job)
            gain_s = saved_s(job, mine.supply, offer, self._tenure_s(offer))
            figures = {"saved_s": gain_s, "cost_s": cost_s}
            if offer.kind is ReplicaKind.DEDICATED:
                return Move(job.job, offer.replica, "dedicated replicas are always leased", figures)
            # A job without a replica does not wait.
            resting = mine.supply.count and now_s < past.not_before_s
            if mine.guests < most and not resting and gain_s > TAKE_ABOVE * cost_s:
                self._wanted_again(past, now_s)
                return Move(job.job, offer.replica, "saves more than the switch costs", figures)
        return None

    def _cost_s(self, offer: Offer, job: JobDemand) -> float:
        return self._costs.expected_s(offer, offer.switch_to(job.job, job.model))

    def _give_back(
        self, jobs: list[JobDemand], held: tuple[Holding, ...], now_s: float
    ) -> tuple[Move, ...]:
        demand = {job.job: job for job in jobs}
        owned: dict[str, _Owned] = {}
        for each in held:
            owned.setdefault(each.job, _Owned()).add(each.offer)
        poor = [job for job in jobs if job.turns > 0 and is_poor(job, held)]
        least: dict[str, tuple[float, Holding]] = {}
        for each in held:
            if each.offer.kind is ReplicaKind.DEDICATED and not _idles(each, demand, poor):
                continue
            past, job = self._past(each.offer.replica), demand.get(each.job)
            others, tenure_s = owned[each.job].supply.minus(each.offer), self._tenure_s(each.offer)
            gain_s = saved_s(job, others, each.offer, tenure_s) if job else 0.0
            cost_s = self._costs.expected_s(each.offer)
            if gain_s >= KEEP_ABOVE * cost_s:
                past.useless_since_s = None
                continue
            if past.useless_since_s is None:
                past.useless_since_s = now_s
            if now_s - past.useless_since_s < max(past.linger_s, cost_s):
                continue
            if each.job not in least or gain_s < least[each.job][0]:
                least[each.job] = (gain_s, each)
        return tuple(self._return(each, gain_s, now_s) for gain_s, each in least.values())

    def _return(self, each: Holding, gain_s: float, now_s: float) -> Move:
        past = self._past(each.offer.replica)
        past.held_s += max(0.0, now_s - each.since_s)
        past.useless_since_s = None
        past.returned_s = now_s
        past.not_before_s = now_s + COOLDOWN_S
        figures = {"saved_s": gain_s, "cost_s": self._costs.expected_s(each.offer)}
        return Move(each.job, each.offer.replica, "saves too little by now", figures)

    def _wanted_again(self, past: _Past, now_s: float) -> None:
        """Linger longer next time, if it was wanted again soon after it was given back."""
        soon = now_s - past.returned_s < MAX_LINGER_S
        past.linger_s = min(MAX_LINGER_S, 2 * past.linger_s) if soon else LINGER_S
        past.useless_since_s = None

    def _share(
        self, jobs: list[JobDemand], held: tuple[Holding, ...], now_s: float
    ) -> tuple[Move, ...]:
        name = self._fair.move(jobs, held, now_s, self._cost_s)
        return tuple(
            Move(each.job, name, "another job has less than its share")
            for each in held
            if each.offer.replica == name
        )

    def _tenure_s(self, offer: Offer) -> float:
        past = self._past(offer.replica)
        return (past.held_s + FIRST_TENURE_S) / (past.revokes + 1)

    def _past(self, replica: str) -> _Past:
        past = self._pasts.get(replica)
        if past is None:
            past = self._pasts[replica] = _Past()
            if len(self._pasts) > REPLICAS_KEPT:
                del self._pasts[next(iter(self._pasts))]
        return past

    def _allowance(self, job: str) -> AimdLimit:
        return self._allowances.setdefault(job, AimdLimit())


@dataclass(slots=True)
class _Owned:
    """Replicas of one job while a decision is made."""

    supply: Supply = field(default_factory=Supply)
    guests: int = 0

    def add(self, offer: Offer) -> None:
        self.supply = self.supply.plus(offer)
        self.guests += offer.kind is ReplicaKind.GUEST


def _idles(dedicated: Holding, demand: Mapping[str, JobDemand], poor: list[JobDemand]) -> bool:
    """Return True if a dedicated replica's job has no work, and another one has some for it."""
    job = demand.get(dedicated.job)
    if job is not None and job.turns > 0:
        return False
    return any(dedicated.offer.serves(job.model) for job in poor)


SWITCHES = tuple(SwitchKind)


def _ranked(offers: Iterable[Offer], job: JobDemand) -> list[Offer]:
    """Return the replicas for the job, the best first: cheapest switch, then the fastest."""
    return sorted(offers, key=lambda offer: _best_first(offer, job))


def _best_first(offer: Offer, job: JobDemand) -> tuple[bool, int, float, str]:
    switch = SWITCHES.index(offer.switch_to(job.job, job.model))
    return offer.kind is not ReplicaKind.DEDICATED, switch, -offer.decode_tok_s, offer.replica

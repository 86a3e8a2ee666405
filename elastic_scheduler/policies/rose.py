"""RosePolicy: leases by net benefit: what a replica saves, what it costs, and whose turn it is.

`AimdLimit` bounds a job's guests: plus one while nothing happens, half when hosts revoke some.
Hosts share their load: where one revokes its guest, others are about to. As in TCP (Chiu and Jain
1989), additive increase and multiplicative decrease let all jobs find the level that hosts can
carry, without being told it. The limit ends no lease; it only stops growth.

`saved_s` compares the gain from another replica with the cost of starting it. A job with W tokens
to make at rate R needs W / R seconds; with a replica of rate r, W / (R + r). Each turn decodes one
sequence, so fewer turns than places leave a part of the rate unused, though less than that share: a
step reads all weights whatever its batch, so turns are faster where fewer share it.

    rate(replicas) = sum of decode rates * 2x / (1 + x),  x = min(1, turns / places)

Alone a turn is twice as fast as in a full batch. By published step times of 8B to 70B models on
H100 and H200 a sequence alone is 1.9 to 4 times as fast as one of 128 with contexts of 3,000
tokens. A replica more than there are turns helps none of them.

The gain counts only while the replica is likely to stay: up to the mean time between its
revocations. The cost is the measured time from the lease to the first token: weights and warm-up.

`FairShares` shares capacity between jobs: weighted max-min over dominant shares. A replica brings
decode rate and KV memory; the larger of a job's two shares of the whole is its dominant share
(Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Replicas are indivisible: the next one
goes to the job with the least dominant share for its weight that has use for it. If there are fewer
replicas than jobs they take turns, by the service that each had so far.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from elastic_scheduler.leases.lease_table import Offer, ReplicaKind, SwitchKind
from elastic_scheduler.policies.types import Holding, JobDemand, LeaseDecision, Move, Situation
from elastic_scheduler.routing.cost import UNKNOWN_DECODE_TOK_S

GROW_S = 5.0
# Revocations this close together are one event.
EVENT_S = 5.0
# Default before the first measurement: a few seconds, so that a first lease is tried. Another job's
# weights are fetched and proven, another model's engine is started.
FIRST_SWITCH_S = 5.0
NEWEST_SHARE = 0.3
KEPT = 65_536
# A replica stays with a job at least this long: moving it costs a switch.
HOLD_S = 120.0
# A move takes at most a tenth of a replica's time with a job.
SWITCHES_HELD = 10.0
# A replica that was revoked for a job is kept for it this long, since draining takes a while.
MEANT_S = 30.0
# Trainers pause between rounds of rollouts: one that pauses this long still waits for its turn.
PAUSE_S = 25.0
# A guest is taken if it saves more than its switch costs, and returned if it saves less than this
# share of it.
KEEP_ABOVE = 0.25
# No shorter than trainers usually pause between rounds of rollouts.
LINGER_S = 25.0
MAX_LINGER_S = 600.0
# Expected stay of a replica that was never revoked.
FIRST_TENURE_S = 600.0
REPLICAS_KEPT = 65_536


class AimdLimit:
    """Limit of a job's guests: infinite at first, halved when hosts revoke some, then growing.

    It grows by one every `grow_s`. Revocations within `event_s` halve it once. Times are monotonic
    seconds passed in.
    """

    def __init__(self, grow_s: float = GROW_S, event_s: float = EVENT_S) -> None:
        self._grow_s = grow_s
        self._event_s = event_s
        self._limit = math.inf
        self._changed_s = -math.inf
        self._halved_s = -math.inf

    def limit(self, now_s: float) -> float:
        """Return the number of guests that the job may have at `now_s`, at least 1."""
        if math.isinf(self._limit):
            return self._limit
        steps = math.floor((now_s - self._changed_s) / self._grow_s)
        if steps > 0:
            self._limit += steps
            self._changed_s += steps * self._grow_s
        return self._limit

    def revoked(self, held: int, now_s: float) -> None:
        """Halve the limit because a host took a guest back; held: the job's guests until then."""
        if now_s < self._halved_s + self._event_s:
            return
        self._limit = max(1.0, min(self.limit(now_s), float(held)) / 2)
        self._changed_s = self._halved_s = now_s


FIRST_SWITCHES_S = {SwitchKind.NONE: FIRST_SWITCH_S, SwitchKind.JOB: 15.0, SwitchKind.MODEL: 60.0}


class SwitchCosts:
    """Average seconds from a lease to its first token, by replica, else by kind of replica.

    Each kind of switch has averages of its own: a replica that keeps its job's weights is ready
    long before one that loads another job's, or another model.
    """

    def __init__(self, first_s: Mapping[SwitchKind, float] = FIRST_SWITCHES_S) -> None:
        self._first_s = first_s
        self._measured_s: dict[tuple[str, SwitchKind], float] = {}
        self._kinds_s: dict[tuple[ReplicaKind, SwitchKind], float] = {}

    def observe(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Add a measured switch to the averages; ignore an invalid duration."""
        if not 0 <= took_s < math.inf:
            return
        key, kind = (offer.replica, switch), (offer.kind, switch)
        known_s = self._measured_s.get(key, took_s)
        self._measured_s[key] = known_s + NEWEST_SHARE * (took_s - known_s)
        kind_s = self._kinds_s.get(kind, took_s)
        self._kinds_s[kind] = kind_s + NEWEST_SHARE * (took_s - kind_s)
        if len(self._measured_s) > KEPT:
            del self._measured_s[next(iter(self._measured_s))]

    def expected_s(self, offer: Offer, switch: SwitchKind = SwitchKind.NONE) -> float:
        """Return the seconds that such a switch of the replica will take, or a default."""
        measured_s = self._measured_s.get(
            (offer.replica, switch), self._kinds_s.get((offer.kind, switch))
        )
        if measured_s is not None:
            return measured_s
        if switch is SwitchKind.NONE:
            return self._first_s[switch]
        # A switch takes no less than a lease that changes nothing.
        return max(self._first_s[switch], self.expected_s(offer))


@dataclass(frozen=True, slots=True)
class Supply:
    """Sum over replicas of a job: their number, decode rate, and places for turns."""

    count: int = 0
    decode_tok_s: float = 0.0
    places: float = 0.0

    def plus(self, offer: Offer) -> "Supply":
        """Return the sum over these replicas and one more."""
        return Supply(
            self.count + 1,
            self.decode_tok_s + (offer.decode_tok_s or UNKNOWN_DECODE_TOK_S),
            self.places + offer.max_sequences,
        )

    def minus(self, offer: Offer) -> "Supply":
        """Return the sum over these replicas without one of them; zero without the last one."""
        if self.count <= 1:
            return Supply()
        return Supply(
            self.count - 1,
            self.decode_tok_s - (offer.decode_tok_s or UNKNOWN_DECODE_TOK_S),
            self.places - offer.max_sequences,
        )

    def rate_tok_s(self, turns: float) -> float:
        """Return the tokens per second that `turns` turns get from these replicas together."""
        if self.places <= 0:
            return 0.0
        share = min(1.0, turns / self.places)
        return self.decode_tok_s * 2 * share / (1 + share)


def supply_of(offers: Iterable[Offer]) -> Supply:
    """Return the sum over the offered replicas."""
    supply = Supply()
    for offer in offers:
        supply = supply.plus(offer)
    return supply


def saved_s(demand: JobDemand, have: Supply, offer: Offer, tenure_s: float = math.inf) -> float:
    """Return the seconds by which the job would be done sooner with `offer` beside `have`.

    Infinite for a job without replicas, or with unknown demand; 0 for one without work, or with no
    more turns than replicas. tenure_s: expected seconds until the replica is revoked.
    """
    if demand.turns <= have.count or demand.owed_tokens <= 0:
        return 0.0
    if math.isinf(demand.owed_tokens):
        return math.inf
    before = have.rate_tok_s(demand.turns)
    after = have.plus(offer).rate_tok_s(demand.turns)
    if after <= before:
        return 0.0
    if before <= 0:
        return math.inf
    left_s = min(demand.owed_tokens / before, tenure_s)
    return left_s * (1 - before / after)


class FairShares:
    """Record of each job's past use of replicas per unit of weight, to decide who is next."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._served: dict[str, float] = {}
        self._wanted_s: dict[str, float] = {}
        self._seen_s: float | None = None
        # Revoked replicas with their next job and time: no other job gets them meanwhile.
        self._meant: dict[str, tuple[str, float]] = {}

    def meant_for(self, replica: str, now_s: float) -> str | None:
        """Return the job for which a free replica was revoked in the last 30 s, else None."""
        job, since_s = self._meant.get(replica, ("", now_s))
        return job if job and now_s < since_s + MEANT_S else None

    def give_up(self, replicas: Iterable[str]) -> None:
        """Let any job have these replicas, which were revoked for one that did not take them."""
        for replica in replicas:
            self._meant.pop(replica, None)

    def account(self, jobs: Sequence[JobDemand], held: Iterable[Holding], now_s: float) -> None:
        """Add each job's use of replicas since the last call to its service.

        A job that wants nothing for longer than a pause gains no credit; service beyond its turn it
        still owes, or a trainer that pauses while it holds a replica would keep it.
        """
        elapsed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        held = tuple(held)
        use = dominant_shares(jobs, held, (each.offer for each in held))
        self._wanted_s = {
            job.job: now_s if job.turns > 0 else self._wanted_s.get(job.job, -math.inf)
            for job in jobs
        }
        active = {name for name, at_s in self._wanted_s.items() if now_s <= at_s + PAUSE_S}
        served = {
            job.job: self._served[job.job] + elapsed_s * use[job.job]
            for job in jobs
            if job.job in self._served
        }
        # A newcomer starts level with the least served, without debt or credit.
        least = min((served[name] for name in active if name in served), default=0.0)
        so_far = {job.job: served.get(job.job, least) for job in jobs}
        self._served = {
            name: (had_s if name in active else max(had_s, least)) - least
            for name, had_s in so_far.items()
        }

    def order(self, jobs: Sequence[JobDemand], use: Mapping[str, float]) -> list[JobDemand]:
        """Return the jobs in the order in which they should get the next replica.

        use: each job's dominant share divided by its weight.
        """
        return sorted(jobs, key=lambda job: (use[job.job], self._served.get(job.job, 0.0), job.job))

    def move(
        self,
        jobs: Sequence[JobDemand],
        held: Sequence[Holding],
        now_s: float,
        cost_s: Callable[[Offer, JobDemand], float] | None = None,
    ) -> str | None:
        """Return the replica that a job should give back for a job with a smaller share; None if
        none.

        The replica is kept for that other job for 30 s. cost_s: returns the seconds of a switch; a
        replica moves only after ten times that, and of equal replicas the cheapest moves.
        """
        use = dominant_shares(jobs, held, (each.offer for each in held))
        weight = {job.job: job.weight for job in jobs}
        poor = [job for job in jobs if is_poor(job, held)]
        ripe = [each for each in held if now_s >= each.since_s + self._hold_s]
        total = _total(each.offer for each in held)
        for job in sorted(poor, key=lambda job: (use[job.job], self._served.get(job.job, 0.0))):
            name = job.job
            full = guests_of(name, held) >= job.max_guests
            others = [
                each
                for each in ripe
                if each.job != name
                and each.job in weight
                and each.offer.serves(job.model)
                and not (full and is_guest(each))
            ]
            by_use = [
                (-use.get(each.job, 0.0), cost_s(each.offer, job) if cost_s else 0.0)
                for each in others
            ]
            for (_, switch_s), each in sorted(zip(by_use, others, strict=True), key=itemgetter(0)):
                if now_s < each.since_s + SWITCHES_HELD * switch_s:
                    continue
                size = _dominant(_total((each.offer,)), total)
                after_rich = use[each.job] - size / weight[each.job]
                after_poor = use[name] + size / weight[name]
                ahead = self._served.get(each.job, 0.0) - self._served.get(name, 0.0)
                if max(after_poor, after_rich) < use[each.job] - 1e-9:
                    return self._ask_back(each, name, now_s)
                # No move makes them more even: they take turns, each for a time by its weight.
                turn = size * self._hold_s / weight[each.job]
                if use[name] < use[each.job] and ahead >= turn - 1e-9:
                    return self._ask_back(each, name, now_s)
        return None

    def _ask_back(self, each: Holding, job: str, now_s: float) -> str:
        meant = {n: (j, at_s) for n, (j, at_s) in self._meant.items() if now_s < at_s + MEANT_S}
        self._meant = {**meant, each.offer.replica: (job, now_s)}
        return each.offer.replica


def is_poor(job: JobDemand, held: Sequence[Holding]) -> bool:
    """Return True if a job has more turns than replicas."""
    return job.turns > count_of(job.job, held)


def is_guest(holding: Holding) -> bool:
    """Return True if the held replica is a guest."""
    return holding.offer.kind is ReplicaKind.GUEST


def guests_of(job: str, held: Iterable[Holding]) -> int:
    """Return the number of guests that a job holds."""
    return sum(each.job == job and is_guest(each) for each in held)


def count_of(job: str, held: Iterable[Holding]) -> int:
    """Return the number of replicas that a job holds."""
    return sum(each.job == job for each in held)


def dominant_shares(
    jobs: Iterable[JobDemand], held: Iterable[Holding], all_offers: Iterable[Offer]
) -> dict[str, float]:
    """Return each job's dominant share of all offers divided by its weight, by job name.

    A job's dominant share is the larger of its shares of decode rate and of KV memory.
    """
    supplies = Supplies(all_offers)
    for each in held:
        supplies.add(each.job, each.offer)
    return supplies.shares(jobs)


class Supplies:
    """Decode rate and KV memory of each job's replicas, out of those of all offers."""

    def __init__(self, all_offers: Iterable[Offer]) -> None:
        self._total = _total(all_offers)
        self._held: dict[str, tuple[float, float]] = {}

    def add(self, job: str, offer: Offer) -> None:
        """Add one more replica to a job."""
        decode_tok_s, kv_tokens = self._held.get(job, (0.0, 0.0))
        self._held[job] = (
            decode_tok_s + (offer.decode_tok_s or 1.0),
            kv_tokens + (offer.kv_tokens or 1.0),
        )

    def shares(self, jobs: Iterable[JobDemand]) -> dict[str, float]:
        """Return each job's dominant share divided by its weight, by job name."""
        return {
            job.job: _dominant(self._held.get(job.job, (0.0, 0.0)), self._total) / job.weight
            for job in jobs
        }


def _dominant(mine: tuple[float, float], total: tuple[float, float]) -> float:
    return max(a / b if b else 0.0 for a, b in zip(mine, total, strict=True))


def _total(offers: Iterable[Offer]) -> tuple[float, float]:
    """Return the sums of decode rate and KV tokens; an unknown figure counts as 1."""
    decode_tok_s = kv_tokens = 0.0
    for offer in offers:
        decode_tok_s += offer.decode_tok_s or 1.0
        kv_tokens += offer.kv_tokens or 1.0
    return decode_tok_s, kv_tokens


@dataclass(slots=True)
class _Past:
    """History of a replica across its leases."""

    held_s: float = 0.0
    revokes: int = 0
    useless_since_s: float | None = None
    linger_s: float = field(default_factory=lambda: LINGER_S)
    returned_s: float = float("-inf")


class RosePolicy:
    """Leasing policy that takes a guest when it saves more time than its switch costs.

    `saved_s` is the measure, `AimdLimit` the limit after hosts revoked guests, and `FairShares` the
    order of jobs. Dedicated replicas are always leased.

    Against oscillation a guest is given back only when it saves less than a quarter of a switch's
    cost. That must hold for `LINGER_S` and no less than a switch takes, so idling costs at most as
    much as taking it again would; and for twice as long each time that it was wanted again soon
    after. One replica a job is given back at a time, since the next one's worth follows from the
    rest.
    """

    name = "rose"

    def __init__(self, hold_s: float = HOLD_S) -> None:
        """Begin without history. hold_s: seconds that a job keeps a replica before another's turn.

        Below the default, `hold_s` also shrinks the default costs of switches in proportion, or the
        first guess alone would hold a replica for minutes.
        """
        cheaper = min(1.0, hold_s / HOLD_S)
        self._costs = SwitchCosts({k: cheaper * cost_s for k, cost_s in FIRST_SWITCHES_S.items()})
        self._fair = FairShares(hold_s)
        self._allowances: dict[str, AimdLimit] = {}
        self._pasts: dict[str, _Past] = {}

    def decide(self, situation: Situation) -> LeaseDecision:
        """Return leases to grant, in the order of fair shares, and leases to end that save too
        little.

        If there are none of either, one replica may be taken back for a job with less than its
        share.
        """
        now_s = situation.now_s
        jobs = [job.cleaned() for job in situation.jobs]
        self._fair.account(jobs, situation.held, now_s)
        take = self._take_all(jobs, situation)
        back = self._give_back(jobs, situation.held, now_s)
        if not take and not back:
            back = self._share(jobs, situation.held, now_s)
        return LeaseDecision(tuple(take), back)

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Halve the job's limit of guests, and record how long the replica stayed."""
        past = self._past(holding.offer.replica)
        past.revokes += 1
        past.held_s += max(0.0, now_s - holding.since_s)
        past.useless_since_s = None
        if holding.offer.kind is ReplicaKind.GUEST:
            self._allowance(holding.job).revoked(held, now_s)

    def switched(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Add a measured switch to the average costs for later decisions."""
        self._costs.observe(offer, took_s, switch)

    def _take_all(self, jobs: list[JobDemand], situation: Situation) -> list[Move]:
        """Return leases of free replicas, each to the job next in order that can use one."""
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
        # job looks at each replica once.
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
        """Return the lease of the first ranked replica that is worth it for the job, or None."""
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
            if mine.guests < most and gain_s > cost_s:
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
        figures = {"saved_s": gain_s, "cost_s": self._costs.expected_s(each.offer)}
        return Move(each.job, each.offer.replica, "saves too little by now", figures)

    def _wanted_again(self, past: _Past, now_s: float) -> None:
        """Double the time before the replica's next return if its last one was recent."""
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
    """Return True if a dedicated replica's job has no work while another could use it."""
    job = demand.get(dedicated.job)
    if job is not None and job.turns > 0:
        return False
    return any(dedicated.offer.serves(job.model) for job in poor)


SWITCHES = tuple(SwitchKind)


def _ranked(offers: Iterable[Offer], job: JobDemand) -> list[Offer]:
    """Return the replicas for the job, the best first: dedicated, cheapest switch, then fastest."""

    def urgency(offer: Offer) -> tuple[bool, int, float, str]:
        switch = SWITCHES.index(offer.switch_to(job.job, job.model))
        return offer.kind is not ReplicaKind.DEDICATED, switch, -offer.decode_tok_s, offer.replica

    return sorted(offers, key=urgency)

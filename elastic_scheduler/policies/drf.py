"""Sharing leased capacity between jobs: weighted max-min over dominant shares.

A replica brings decode rate and KV memory; the larger of a job's two shares of the whole is its
dominant share (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Replicas are indivisible:
the next one goes to the job with the least dominant share for its weight that has use for it. If
there are fewer replicas than jobs they take turns, by the service that each had so far.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from elastic_scheduler.leases.lease_table import Offer, ReplicaKind
from elastic_scheduler.policies.types import Holding, JobDemand

# A replica stays with a job at least this long: moving it costs a switch.
HOLD_S = 120.0
# A move takes at most a tenth of a replica's time with a job.
SWITCHES_HELD = 10.0
# A replica that was revoked for a job is kept for it this long, since draining takes a while.
MEANT_S = 30.0
# Trainers pause between rounds of rollouts: one that pauses this long still waits for its turn.
PAUSE_S = 25.0


class FairShares:
    """Service of each job so far, per unit of weight, and the next job."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._served: dict[str, float] = {}
        self._wanted_s: dict[str, float] = {}
        self._seen_s: float | None = None
        # Revoked replicas with their next job and time: no other job gets them meanwhile.
        self._meant: dict[str, tuple[str, float]] = {}

    def meant_for(self, replica: str, now_s: float) -> str | None:
        """Return the job that a free replica was revoked for, None if it is any job's."""
        job, since_s = self._meant.get(replica, ("", now_s))
        return job if job and now_s < since_s + MEANT_S else None

    def give_up(self, replicas: Iterable[str]) -> None:
        """Release replicas that their next jobs did not take."""
        for replica in replicas:
            self._meant.pop(replica, None)

    def account(self, jobs: Sequence[JobDemand], held: Iterable[Holding], now_s: float) -> None:
        """Add the service since the last call.

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
        """Return the jobs, the one that should get the next replica first."""
        return sorted(jobs, key=lambda job: (use[job.job], self._served.get(job.job, 0.0), job.job))

    def move(
        self,
        jobs: Sequence[JobDemand],
        held: Sequence[Holding],
        now_s: float,
        cost_s: Callable[[Offer, JobDemand], float] | None = None,
    ) -> str | None:
        """Return the replica that its job should give back for one that is worse off, if any.

        cost_s: returns the time of the switch. It is a small part of the time that a job keeps a
        replica, and of equal replicas the cheapest goes.
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
            for (_, switch_s), each in sorted(zip(by_use, others, strict=True), key=_first):
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


def _first(pair: tuple[tuple[float, float], Holding]) -> tuple[float, float]:
    return pair[0]


def is_poor(job: JobDemand, held: Sequence[Holding]) -> bool:
    """Return True if a job could use another replica."""
    return job.turns > count_of(job.job, held)


def is_guest(holding: Holding) -> bool:
    """Return True for a guest."""
    return holding.offer.kind is ReplicaKind.GUEST


def guests_of(job: str, held: Iterable[Holding]) -> int:
    """Return the guests that a job holds."""
    return sum(each.job == job and is_guest(each) for each in held)


def count_of(job: str, held: Iterable[Holding]) -> int:
    """Return the number of replicas that a job holds."""
    return sum(each.job == job for each in held)


def dominant_shares(
    jobs: Iterable[JobDemand], held: Iterable[Holding], all_offers: Iterable[Offer]
) -> dict[str, float]:
    """Return each job's dominant share of all offers, divided by its weight."""
    supplies = Supplies(all_offers)
    for each in held:
        supplies.add(each.job, each.offer)
    return supplies.shares(jobs)


class Supplies:
    """Resources that each job holds of a whole, counted up as replicas are given out."""

    def __init__(self, all_offers: Iterable[Offer]) -> None:
        self._total = _total(all_offers)
        self._held: dict[str, tuple[float, float]] = {}

    def add(self, job: str, offer: Offer) -> None:
        """Add one more replica of a job."""
        decode_tok_s, kv_tokens = self._held.get(job, (0.0, 0.0))
        self._held[job] = (
            decode_tok_s + (offer.decode_tok_s or 1.0),
            kv_tokens + (offer.kv_tokens or 1.0),
        )

    def shares(self, jobs: Iterable[JobDemand]) -> dict[str, float]:
        """Return each job's dominant share, divided by its weight."""
        return {
            job.job: _dominant(self._held.get(job.job, (0.0, 0.0)), self._total) / job.weight
            for job in jobs
        }


def _dominant(mine: tuple[float, float], total: tuple[float, float]) -> float:
    return max(a / b if b else 0.0 for a, b in zip(mine, total, strict=True))


def _total(offers: Iterable[Offer]) -> tuple[float, float]:
    """Return decode rate and KV tokens; a replica that knows neither counts as one of each."""
    decode_tok_s = kv_tokens = 0.0
    for offer in offers:
        decode_tok_s += offer.decode_tok_s or 1.0
        kv_tokens += offer.kv_tokens or 1.0
    return decode_tok_s, kv_tokens

"""Sharing leased capacity between jobs: weighted max-min over dominant shares.

A replica brings decode rate and KV memory; the larger of a job's two shares of the whole is its
dominant share (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Replicas are indivisible:
the next one goes to the job with the least dominant share for its weight that has use for it, and
where there are fewer replicas than jobs they take turns, by the service that each had so far.
"""

from collections.abc import Iterable, Mapping, Sequence

from elastic_scheduler.leases.lease_table import Offer
from elastic_scheduler.policies.types import Holding, JobDemand

# A replica stays with a job at least this long: moving it costs a switch.
HOLD_S = 120.0


class FairShares:
    """Service of each job so far, per unit of weight, and who is next. Times are handed in."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._served: dict[str, float] = {}
        self._seen_s: float | None = None

    def account(self, jobs: Sequence[JobDemand], held: Iterable[Holding], now_s: float) -> None:
        """Count the service since the last call; a job that wants nothing gains no credit."""
        elapsed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        held = tuple(held)
        use = dominant_shares(jobs, held, (each.offer for each in held))
        active = {job.job for job in jobs if job.turns > 0}
        served = {
            job.job: self._served[job.job] + elapsed_s * use[job.job]
            for job in jobs
            if job.job in self._served
        }
        # A newcomer starts level with the least served, so that it owes and is owed nothing.
        least = min((served[name] for name in active if name in served), default=0.0)
        self._served = {
            job.job: (served.get(job.job, least) if job.job in active else least) - least
            for job in jobs
        }

    def order(self, jobs: Sequence[JobDemand], use: Mapping[str, float]) -> list[JobDemand]:
        """Jobs, the one that should get the next replica first."""
        return sorted(jobs, key=lambda job: (use[job.job], self._served.get(job.job, 0.0), job.job))

    def move(self, jobs: Sequence[JobDemand], held: Sequence[Holding], now_s: float) -> str | None:
        """The replica that its job should give back for one that is worse off, if any."""
        use = dominant_shares(jobs, held, (each.offer for each in held))
        weight = {job.job: job.weight for job in jobs}
        poor = [job.job for job in jobs if job.turns > count_of(job.job, held)]
        ripe = [each for each in held if now_s >= each.since_s + self._hold_s]
        for name in sorted(poor, key=lambda name: (use[name], self._served.get(name, 0.0))):
            for each in sorted(ripe, key=lambda each: -use.get(each.job, 0.0)):
                if each.job == name or each.job not in weight:
                    continue
                size = dominant_size(each.offer, held)
                after_rich = use[each.job] - size / weight[each.job]
                after_poor = use[name] + size / weight[name]
                ahead = self._served.get(each.job, 0.0) - self._served.get(name, 0.0)
                if max(after_poor, after_rich) < use[each.job] - 1e-9:
                    return each.offer.replica
                # No move makes them more even: they take turns, each as long as its weight says.
                turn = size * self._hold_s / weight[each.job]
                if use[name] < use[each.job] and ahead >= turn - 1e-9:
                    return each.offer.replica
        return None


def count_of(job: str, held: Iterable[Holding]) -> int:
    """Replicas that a job holds."""
    return sum(each.job == job for each in held)


def dominant_shares(
    jobs: Iterable[JobDemand], held: Iterable[Holding], all_offers: Iterable[Offer]
) -> dict[str, float]:
    """Each job's dominant share of all offers, divided by its weight."""
    held, total = tuple(held), _total(all_offers)
    shares = {}
    for job in jobs:
        mine = _total(each.offer for each in held if each.job == job.job)
        shares[job.job] = max(a / b if b else 0.0 for a, b in zip(mine, total, strict=True))
        shares[job.job] /= job.weight
    return shares


def dominant_size(offer: Offer, held: Sequence[Holding]) -> float:
    """One replica's dominant share of all that is held."""
    total = _total(each.offer for each in held)
    mine = _total((offer,))
    return max(a / b if b else 0.0 for a, b in zip(mine, total, strict=True))


def _total(offers: Iterable[Offer]) -> tuple[float, float]:
    """Decode rate and KV tokens; a replica that knows neither counts as one of each."""
    decode_tok_s = kv_tokens = 0.0
    for offer in offers:
        decode_tok_s += offer.decode_tok_s or 1.0
        kv_tokens += offer.kv_tokens or 1.0
    return decode_tok_s, kv_tokens

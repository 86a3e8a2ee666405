"""Leasing policies to compare with: fixed pool, spot, ROSE as published, serverless.

They decide over the same `Situation` as ROSE's own policy, so all of them can be run on one trace.
Where a policy does not care which job gets a replica, `spread` gives it to the job that has the
fewest for its weight.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable

from elastic_scheduler.leases.lease_table import Offer, ReplicaKind, SwitchKind
from elastic_scheduler.policies.types import Holding, LeaseDecision, Move, Situation

TARGET_SHARE = 0.7
WINDOW_S = 60.0


def spread(offers: Iterable[Offer], situation: Situation, why: str) -> tuple[Move, ...]:
    """Return a move for each offer, to the able job with the fewest replicas for its weight.

    Able is a job whose model the replica serves and whose quota of guests is not used up.
    """
    count = Counter(holding.job for holding in situation.held)
    guests = Counter(h.job for h in situation.held if h.offer.kind is ReplicaKind.GUEST)
    moves = []
    for offer in offers:
        is_guest = offer.kind is ReplicaKind.GUEST
        able = [
            job
            for job in situation.jobs
            if offer.serves(job.model) and not (is_guest and guests[job.job] >= job.max_guests)
        ]
        if not able:
            continue
        job = min(able, key=lambda job: ((count[job.job] + 1) / job.weight, job.job)).job
        count[job] += 1
        guests[job] += is_guest
        moves.append(Move(job, offer.replica, why))
    return tuple(moves)


class _WithoutLearning:
    """Base of a policy that learns neither from revocations nor from the costs of switches."""

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Change nothing: a replica that is offered again is taken again."""

    def switched(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Change nothing: costs do not count."""


class FixedPolicy(_WithoutLearning):
    """Leasing policy of a fixed pool: dedicated replicas are leased and kept, guests never are.

    Source: the usual set-up of RL frameworks (verl, OpenRLHF, slime), whose rollout engines are
    started with the job; the resource-fixed baseline of the ROSE paper (arXiv 2605.06534).
    """

    name = "fixed"

    def decide(self, situation: Situation) -> LeaseDecision:
        """Return leases of all free dedicated replicas, and end none."""
        own = [offer for offer in situation.free if offer.kind is ReplicaKind.DEDICATED]
        return LeaseDecision(spread(own, situation, "dedicated replicas are always leased"))


class SpotPolicy(_WithoutLearning):
    """Policy that leases every offer at once and keeps it until its node takes it back.

    Source: RLBoost (arXiv 2510.19225), which adds preemptible instances as they appear, pulls
    weights to them and moves their tokens elsewhere when they are preempted. Its balance between
    its own and the preemptible instances is the router's business here.
    """

    name = "spot"

    def decide(self, situation: Situation) -> LeaseDecision:
        """Return leases of all free offers, and end none."""
        return LeaseDecision(spread(situation.free, situation, "it is offered"))


class PaperPolicy(_WithoutLearning):
    """Leasing policy that adds guests to dedicated replicas, but none after a revocation in a step.

    Source: the ROSE paper (arXiv 2605.06534) as far as this project's design restates it: rollouts
    go to dedicated and to opportunistic serving GPUs; when a host's pressure takes memory or a GPU
    back, its turns are routed elsewhere and growth is frozen until the next RL step. Leases that
    are idle are kept, and what a switch costs does not count. Where the paper leaves a choice open
    this takes the one that favours it: all that is offered, at once.
    """

    name = "paper"

    def __init__(self) -> None:
        self._frozen_step: dict[str, int] = {}
        self._step: dict[str, int] = {}

    def decide(self, situation: Situation) -> LeaseDecision:
        """Return leases of all free dedicated replicas, and of guests for jobs not frozen."""
        self._step = {job.job: job.step for job in situation.jobs}
        growing = tuple(
            job for job in situation.jobs if self._frozen_step.get(job.job, -1) < job.step
        )
        own = [offer for offer in situation.free if offer.kind is ReplicaKind.DEDICATED]
        guests = [offer for offer in situation.free if offer.kind is ReplicaKind.GUEST]
        open_to = Situation(situation.now_s, (), situation.held, growing)
        return LeaseDecision(
            (
                *spread(own, situation, "dedicated replicas are always leased"),
                *spread(guests, open_to, "it is offered, and nothing froze growth in this step"),
            )
        )

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Freeze the job: it gets no more guests until its next RL step."""
        self._frozen_step[holding.job] = self._step.get(holding.job, 0)


class ServerlessPolicy(_WithoutLearning):
    """Autoscaling policy: leases guests for the turns in flight at 70% of places, none when idle.

    Source: Knative's pod autoscaler (target utilisation 70%, stable window 60 s), which serverless
    inference systems scale by. Grows at once; shrinks to the most that the last window needed, so
    that one quiet moment ends nothing. What a cold start costs does not count.
    """

    name = "serverless"

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._needed: deque[tuple[float, float]] = deque()

    def decide(self, situation: Situation) -> LeaseDecision:
        """Return leases, or returns, of guests up to the number that the turns need.

        Free dedicated replicas are always leased.
        """
        own = [offer for offer in situation.free if offer.kind is ReplicaKind.DEDICATED]
        take = spread(own, situation, "dedicated replicas are always leased")
        held = [each for each in situation.held if each.offer.kind is ReplicaKind.GUEST]
        free = [offer for offer in situation.free if offer.kind is ReplicaKind.GUEST]
        now_needed = self._guests_needed(situation, own)
        self._needed.append((situation.now_s, now_needed))
        while self._needed[0][0] < situation.now_s - self._window_s:
            self._needed.popleft()
        if now_needed > len(held):
            count = len(free) if math.isinf(now_needed) else math.ceil(now_needed) - len(held)
            taken = spread(free[:count], situation, "turns need more places")
            return LeaseDecision((*take, *taken))
        surplus = len(held) - max(needed for _, needed in self._needed)
        newest_first = sorted(held, key=lambda each: -each.since_s)
        back = newest_first[: int(surplus)] if surplus >= 1 else []
        why = f"fewer were needed for {self._window_s:g} s"
        return LeaseDecision(take, tuple(Move(each.job, each.offer.replica, why) for each in back))

    @staticmethod
    def _guests_needed(situation: Situation, taking: list[Offer]) -> float:
        turns = sum(job.cleaned().turns for job in situation.jobs)
        own = [e.offer for e in situation.held if e.offer.kind is ReplicaKind.DEDICATED]
        turns -= sum(offer.max_sequences for offer in (*own, *taking))
        guests = [e.offer for e in situation.held if e.offer.kind is ReplicaKind.GUEST]
        guests += [offer for offer in situation.free if offer.kind is ReplicaKind.GUEST]
        if turns <= 0 or not guests:
            return 0.0
        places = sum(offer.max_sequences for offer in guests) / len(guests)
        return turns / max(1.0, TARGET_SHARE * places)

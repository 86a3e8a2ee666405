"""Capacity follows concurrency."""

import math
from collections import deque

from elastic_scheduler.offer import Offer, ReplicaKind
from elastic_scheduler.policies.spread import spread
from elastic_scheduler.situation import Decision, Holding, Move, Situation

TARGET_SHARE = 0.7
WINDOW_S = 60.0


class ServerlessPolicy:
    """As many guests as the turns in flight need at 70% of their places; down to none when idle.

    Source: Knative's pod autoscaler (target utilisation 70%, stable window 60 s), which serverless
    inference systems scale by. Grows at once; shrinks to the most that the last window needed, so
    that one quiet moment ends nothing. What a cold start costs does not count.
    """

    name = "serverless"

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._needed: deque[tuple[float, float]] = deque()

    def decide(self, situation: Situation) -> Decision:
        """Take or give back guests until their number is the needed one."""
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
            return Decision((*take, *taken))
        surplus = len(held) - max(needed for _, needed in self._needed)
        newest_first = sorted(held, key=lambda each: -each.since_s)
        back = newest_first[: int(surplus)] if surplus >= 1 else []
        why = f"fewer were needed for {self._window_s:g} s"
        return Decision(take, tuple(Move(each.job, each.offer.replica, why) for each in back))

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Changes nothing: another is taken when turns need it."""

    def switched(self, offer: Offer, took_s: float) -> None:
        """Costs do not count."""

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

"""Dedicated replicas only."""

from elastic_scheduler.offer import Offer, ReplicaKind
from elastic_scheduler.policies.spread import spread
from elastic_scheduler.situation import Decision, Holding, Situation


class FixedPolicy:
    """A fixed pool: every dedicated replica is leased and kept, no guest ever is.

    Source: the usual set-up of RL frameworks (verl, OpenRLHF, slime), whose rollout engines are
    started with the job; the resource-fixed baseline of the ROSE paper (arXiv 2605.06534).
    """

    name = "fixed"

    def decide(self, situation: Situation) -> Decision:
        """Take what is dedicated."""
        own = [offer for offer in situation.free if offer.kind is ReplicaKind.DEDICATED]
        return Decision(spread(own, situation, "dedicated replicas are always leased"))

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Changes nothing: what is offered again is taken again."""

    def switched(self, offer: Offer, took_s: float) -> None:
        """Costs do not count."""

"""Everything that can be preempted is used while it is there."""

from elastic_scheduler.offer import Offer
from elastic_scheduler.policies.spread import spread
from elastic_scheduler.situation import Decision, Holding, Situation


class SpotPolicy:
    """Leases whatever is offered the moment it is, and keeps it until it is taken.

    Source: RLBoost (arXiv 2510.19225), which adds preemptible instances as they appear, pulls
    weights to them and moves their tokens elsewhere when they are preempted. Its balance between
    its own and the preemptible instances is the router's business here.
    """

    name = "spot"

    def decide(self, situation: Situation) -> Decision:
        """Take all."""
        return Decision(spread(situation.free, situation, "it is offered"))

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Changes nothing: what is offered again is taken again."""

    def switched(self, offer: Offer, took_s: float) -> None:
        """Costs do not count."""

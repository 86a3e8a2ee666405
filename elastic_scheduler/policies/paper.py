"""ROSE as published."""

from elastic_scheduler.offer import Offer, ReplicaKind
from elastic_scheduler.policies.spread import spread
from elastic_scheduler.situation import Decision, Holding, Situation


class PaperPolicy:
    """Opportunistic guests on top of dedicated replicas, grown only between RL steps.

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

    def decide(self, situation: Situation) -> Decision:
        """Take all for jobs that no host pushed back in this step."""
        self._step = {job.job: job.step for job in situation.jobs}
        growing = tuple(
            job for job in situation.jobs if self._frozen_step.get(job.job, -1) < job.step
        )
        own = [offer for offer in situation.free if offer.kind is ReplicaKind.DEDICATED]
        guests = [offer for offer in situation.free if offer.kind is ReplicaKind.GUEST]
        open_to = Situation(situation.now_s, (), situation.held, growing)
        return Decision(
            (
                *spread(own, situation, "dedicated replicas are always leased"),
                *spread(guests, open_to, "it is offered, and nothing froze growth in this step"),
            )
        )

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Freeze the job's growth until its next step."""
        self._frozen_step[holding.job] = self._step.get(holding.job, 0)

    def switched(self, offer: Offer, took_s: float) -> None:
        """Costs do not count."""

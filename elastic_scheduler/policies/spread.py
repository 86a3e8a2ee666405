"""Giving replicas to jobs where a policy has no opinion of its own about which."""

from collections.abc import Iterable

from elastic_scheduler.offer import Offer
from elastic_scheduler.situation import Move, Situation


def spread(offers: Iterable[Offer], situation: Situation, why: str) -> tuple[Move, ...]:
    """Each offer to the job that has the fewest replicas for its weight; none without jobs."""
    if not situation.jobs:
        return ()
    count = {job.job: 0 for job in situation.jobs}
    for holding in situation.held:
        if holding.job in count:
            count[holding.job] += 1
    weight = {job.job: job.weight for job in situation.jobs}
    moves = []
    for offer in offers:
        job = min(count, key=lambda name: ((count[name] + 1) / weight[name], name))
        count[job] += 1
        moves.append(Move(job, offer.replica, why))
    return tuple(moves)

"""Libra: a hybrid pool between rollout and training, and a queue by results of tools.

Source: Chen, Tan, Li, Xu, "Libra: Efficient Resource Management for Agentic RL Post-Training"
(arXiv 2606.03077, 2026; 48 A800 GPUs, up to 3.0x). Two mechanisms, as its abstract states them:

* a planner divides the cards between rollout and training through an elastic hybrid pool, whose
  workers change sides without blocking either;
* a causality-driven multi-level feedback queue (C-MLFQ) sorts trajectories by what their tools
  returned instead of by predicted lengths.

It borrows no serving card. Where the paper leaves a figure open the model takes the one that
favours it: all training cards are in the pool, a change of sides takes `SWITCH_S`, and cards roll
out as long as rollouts are faster by it, as ROSE's own cost model reckons. Its buckets of different
parallel sizes are not modelled: engines here are all equal, and what is left of C-MLFQ is the order
of the queue.
"""

from elastic_scheduler import (
    Holding,
    LeaseDecision,
    Move,
    Offer,
    ReplicaKind,
    Situation,
    SwitchKind,
)
from elastic_scheduler.policies.baselines import spread
from elastic_scheduler.policies.cost_model import Supply, supply_of

HYBRID = "hybrid"
# Time to load the rollout engine's weights from the trainer's own cards, and its graphs.
SWITCH_S = 3.0
# The planner gives a card to rollouts that are so much faster with it, and takes it back below.
# Cards of a synchronous trainer have nothing else to do meanwhile.
TAKE_GAIN, KEEP_GAIN = 0.002, 0.0
# Levels of the queue: trajectories whose tools failed so often.
LEVELS = 3


def level_of(failed: int) -> int:
    """Priority of a trajectory of which so many tool results failed; lower goes first.

    A failed result makes another try, and so a long trajectory, more likely: it must not queue.
    """
    return -min(LEVELS - 1, failed)


def is_hybrid(offer: Offer) -> bool:
    """Return True for a replica on training cards."""
    return offer.replica.startswith(HYBRID)


class LibraPolicy:
    """Takes every dedicated and hybrid replica that is offered, and gives hybrid ones back as the
    batch runs out of turns. Cards that train are not offered."""

    name = "libra"

    def decide(self, situation: Situation) -> LeaseDecision:
        """Take while turns need places, give back what the others have room for."""
        turns = sum(job.cleaned().turns for job in situation.jobs)
        dedicated = [o for o in situation.free if o.kind is ReplicaKind.DEDICATED]
        own = [offer for offer in dedicated if not is_hybrid(offer)]
        pool = [offer for offer in dedicated if is_hybrid(offer)]
        held = [each for each in situation.held if is_hybrid(each.offer)]
        supply = supply_of([*(each.offer for each in situation.held), *own])
        take = list(spread(own, situation, "dedicated replicas are always leased"))
        more: list[Offer] = []
        for offer in pool:
            if not _worth(supply, supply.plus(offer), turns, TAKE_GAIN):
                break
            more.append(offer)
            supply = supply.plus(offer)
        take += spread(more, situation, "the plan gives its cards to rollouts")
        if more or not held:
            return LeaseDecision(tuple(take))
        last = max(held, key=lambda each: (each.since_s, each.offer.replica))
        if _worth(supply.minus(last.offer), supply, turns, KEEP_GAIN):
            return LeaseDecision(tuple(take))
        why = "rollouts are hardly slower without it"
        return LeaseDecision(tuple(take), (Move(last.job, last.offer.replica, why),))

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Training needs the cards: nothing changes by that."""

    def switched(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Costs do not count."""


def _worth(without: Supply, with_it: Supply, turns: float, gain: float) -> bool:
    """Return True if one more replica makes rollouts faster by that share."""
    if turns <= without.count:
        return False
    return with_it.rate_tok_s(turns) > (1 + gain) * without.rate_tok_s(turns)

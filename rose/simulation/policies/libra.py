"""Libra: a hybrid pool between rollout and training, and a queue by results of tools.

Source: Chen, Tan, Li, Xu, "Libra: Efficient Resource Management for Agentic RL Post-Training"
(arXiv 2606.03077, 2026; 48 A800 GPUs, up to 3.0x). Two mechanisms, as its abstract states them:

* a planner divides the cards between rollout and training through an elastic hybrid pool, whose
  workers change sides without blocking either;
* a causality-driven multi-level feedback queue (C-MLFQ) sorts trajectories by what their tools
  returned instead of by predicted lengths.

It borrows no serving card. Where the paper leaves a figure open the model takes the one that
favours it: all training cards are in the pool, a change of sides takes `SWITCH_S`, and cards leave
the rollouts one by one when the dedicated replicas have room for what is left. Its buckets of
different parallel sizes are not modelled: engines here are all equal, and what is left of C-MLFQ is
the order of the queue.
"""

from elastic_scheduler import Decision, Holding, Move, Offer, ReplicaKind, Situation, SwitchKind
from elastic_scheduler.policies.baselines import spread

HYBRID = "hybrid"
# To load the rollout engine's weights from the trainer's own cards, and its graphs.
SWITCH_S = 3.0
# Levels of the queue: trajectories whose tools failed so often.
LEVELS = 3


def level_of(failed: int) -> int:
    """Priority of a trajectory of which so many tool results failed; lower goes first.

    A failed result makes another try, and so a long trajectory, more likely: it must not queue.
    """
    return -min(LEVELS - 1, failed)


def is_hybrid(offer: Offer) -> bool:
    """Whether a replica lies on training cards."""
    return offer.replica.startswith(HYBRID)


class LibraPolicy:
    """Takes every dedicated and hybrid replica that is offered, and gives hybrid ones back as the
    batch runs out of turns. Cards that train are not offered."""

    name = "libra"

    def decide(self, situation: Situation) -> Decision:
        """Take while turns need places, give back what the others have room for."""
        turns = sum(job.cleaned().turns for job in situation.jobs)
        dedicated = [o for o in situation.free if o.kind is ReplicaKind.DEDICATED]
        held = [each for each in situation.held if not is_hybrid(each.offer)]
        hybrid = [each for each in situation.held if is_hybrid(each.offer)]
        places = sum(each.offer.max_sequences for each in held)
        places += sum(offer.max_sequences for offer in dedicated if not is_hybrid(offer))
        own = [offer for offer in dedicated if not is_hybrid(offer)]
        # A quarter of a full batch runs at nearly the speed of one sequence.
        wanted = turns > places / 4
        more = [offer for offer in dedicated if is_hybrid(offer)] if wanted else []
        take = (
            *spread(own, situation, "dedicated replicas are always leased"),
            *spread(more, situation, "the plan gives its cards to rollouts"),
        )
        if wanted or not hybrid:
            return Decision(take)
        last = min(hybrid, key=lambda each: each.since_s)
        why = "the other replicas have room for what is left"
        return Decision(take, (Move(last.job, last.offer.replica, why),))

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Training needs the cards: nothing changes by that."""

    def switched(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Costs do not count."""

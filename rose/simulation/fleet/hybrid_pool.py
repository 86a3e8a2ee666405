"""Policies by which training cards roll out while they do not train: Libra and RLBoost.

    rollout phase ── SWITCH_S ──► engines up, offered ──┐
    batch complete, or window over ──► revoked ── SWITCH_S ──► training

Libra (Chen, Tan, Li, Xu, "Libra: Efficient Resource Management for Agentic RL Post-Training", arXiv
2606.03077, 2026; 48 A800 GPUs, up to 3.0x): a planner divides the cards between rollout and
training through an elastic hybrid pool, whose workers change sides without blocking either. It
borrows no serving card. Where the paper leaves a figure open the model takes the one that favours
it: all training cards are in the pool, a change of sides takes `SWITCH_S`, and cards roll out as
long as rollouts are faster by it, as ROSE's own cost model reckons. Its buckets of different
parallel sizes are not modelled, nor is its queue by results of tools: no workload here says which
results failed.

RLBoost (Wu et al., "RLBoost: Harvesting Preemptible Resources for Cost-Efficient Reinforcement
Learning on LLMs", arXiv 2510.19225, 2025; 1.51x to 1.97x over reserved cards alone):
* adaptive rollout offload: the reserved (training) cards roll out too at the beginning of a step,
  for a window that adapts from step to step; then they train. `OffloadWindow` grows the window
  while training would wait for rollouts anyway, and shrinks it when fewer are left for it;
* pull-based weight transfer: a new instance fetches the newest version by itself, as all do here;
* token-level collection and migration: the turn journal does it for every policy here.
Its leasing is `spot`'s: each offer is taken at once and kept until it is preempted.
"""

from collections.abc import Sequence

from elastic_scheduler import (
    Holding,
    LeaseDecision,
    Move,
    Offer,
    ReplicaKind,
    Situation,
    SwitchKind,
)
from elastic_scheduler.policies.baselines import SpotPolicy, spread
from elastic_scheduler.policies.rose import Supply, supply_of
from rose.simulation.clock import EventQueue
from rose.simulation.fleet.node import ModelledNode
from rose.simulation.fleet.trainer import ModelledTrainer

HYBRID = "hybrid"
# Time to load the rollout engine's weights from the trainer's own cards, and its graphs.
SWITCH_S = 3.0
# Gain in rollout speed above which the planner gives a card to rollouts, and below which it
# takes it back.
# Cards of a synchronous trainer have nothing else to do meanwhile.
TAKE_GAIN, KEEP_GAIN = 0.002, 0.0
GROW = 1.25
SHRINK = 0.8
FIRST_WINDOW_S = 60.0
LEAST_WINDOW_S, MOST_WINDOW_S = 5.0, 600.0


def is_hybrid(offer: Offer) -> bool:
    """Return True if the offer is of a replica on training cards."""
    return offer.replica.startswith(HYBRID)


class LibraPolicy:
    """Leasing policy that takes every dedicated replica, and hybrid ones while they speed rollouts
    up.

    It gives a hybrid one back when the batch runs out of turns. Cards that train are not offered.
    """

    name = "libra"

    def decide(self, situation: Situation) -> LeaseDecision:
        """Return the offers to lease, and at most one hybrid replica to give back because the
        others have room for its turns.
        """
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
        """Do nothing: training needs the cards, which changes no later decision."""

    def switched(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Do nothing: this policy does not count costs of switches."""


def _worth(without: Supply, with_it: Supply, turns: float, gain: float) -> bool:
    """Return True if the supply `with_it` is faster than `without` by more than the share `gain`,
    at so many turns.
    """
    if turns <= without.count:
        return False
    return with_it.rate_tok_s(turns) > (1 + gain) * without.rate_tok_s(turns)


class RlboostPolicy(SpotPolicy):
    """Leasing policy that takes every preemptible instance, and the training cards while their
    window is open.
    """

    name = "rlboost"


class OffloadWindow:
    """Length of the window at the start of a rollout phase in which training cards roll out; it
    adapts to past phases.
    """

    def __init__(self) -> None:
        self.window_s = FIRST_WINDOW_S

    def step(self, rollout_s: float) -> None:
        """Adapt the window after a rollout phase of `rollout_s` seconds: grow it if the phase
        outlasted it, else shrink it.
        """
        factor = GROW if rollout_s > self.window_s else SHRINK
        self.window_s = min(MOST_WINDOW_S, max(LEAST_WINDOW_S, self.window_s * factor))


class ModelledHybridPool:
    """Replicas of some nodes, on the trainer's own cards, which run while the trainer does not
    train.

    windowed: they run for a window that adapts from step to step (`rlboost`); else until the batch
    is complete or the leasing policy gave them back (`libra`).
    """

    def __init__(
        self,
        queue: EventQueue,
        trainer: ModelledTrainer,
        nodes: Sequence[ModelledNode],
        *,
        windowed: bool,
    ) -> None:
        self._queue = queue
        self._nodes = nodes
        self._replicas = [(node, each) for node in nodes for each in node.replicas.values()]
        self._window = OffloadWindow() if windowed else None
        self._phase = 0
        self._began_s = 0.0
        trainer.on_phase = self._changed

    def _changed(self, rollout: bool) -> float:
        """Handle the begin of a rollout phase (True) or of training; return the seconds that
        training waits for its cards.
        """
        self._phase += 1
        phase = self._phase
        if rollout:
            self._began_s = self._queue.now_s
            self._queue.after_s(SWITCH_S, lambda: self._lend(phase))
            if self._window is not None:
                self._queue.after_s(self._window.window_s, lambda: self._close(phase))
            return 0.0
        if self._window is not None:
            self._window.step(self._queue.now_s - self._began_s)
        return self._take_back()

    def _lend(self, phase: int) -> None:
        if phase != self._phase:
            return
        for node, replica in self._replicas:
            if not replica.up:
                node.start_engine(replica)
        for node in self._nodes:
            node.report()

    def _close(self, phase: int) -> None:
        if phase == self._phase:
            self._take_back()

    def _take_back(self) -> float:
        """End all engines on the training cards; return the seconds until the cards can train."""
        blocked = False
        for node, replica in self._replicas:
            if replica.up:
                blocked |= replica.lease_epoch() is not None
                node.take_card(replica, "its cards train")
        for node in self._nodes:
            node.report()
        return SWITCH_S if blocked else 0.0

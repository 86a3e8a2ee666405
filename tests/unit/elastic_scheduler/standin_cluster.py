"""A cluster that is a stand-in: replicas decode at constant rates, hosts burst by a timetable.

A job runs RL steps: its turns are decoded, then it trains for a while and asks for nothing. Time
goes in ticks; the same trace has the same outcome for a policy, every time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from elastic_scheduler import Holding, JobDemand, Offer, Policy, ReplicaKind, Situation

TICK_S = 0.5
PLACES = 16
DEDICATED = 2


@dataclass(frozen=True, slots=True)
class Trace:
    """Guests are offered where `offered(guest, now_s)`; a lease needs `switch_s` to its tokens."""

    steps: int
    turns: int
    mean_tokens: int
    train_s: float
    guests: int
    switch_s: float
    offered: Callable[[int, float], bool]


@dataclass(slots=True)
class Outcome:
    """Result of a policy on a trace; guest seconds are the lent ones."""

    done_s: float = math.inf
    guest_s: float = 0.0
    takes: int = 0
    returns: int = 0
    revokes: int = 0
    changes_at_s: list[float] = field(default_factory=list)


def bursty(guest: int, now_s: float) -> bool:
    """Hosts are calm for 90 s and busy for 30 s, each shifted a little."""
    return (now_s + 7 * guest) % 120 < 90


def offer_of(name: str, kind: ReplicaKind) -> Offer:
    return Offer(name, kind, "http://h", "n", 0, 800.0, 8e3, 0, True, 5.0, 0, PLACES)


class StandinCluster:
    """One job, a few dedicated replicas, guests that come and go."""

    def __init__(self, policy: Policy, trace: Trace, seed: int = 0) -> None:
        self.policy, self.trace = policy, trace
        self.random = Random(seed)
        self.held: dict[str, Holding] = {}
        self.ready_s: dict[str, float] = {}
        self.left: list[float] = []
        self.step = 0
        self.idle_until_s = 0.0
        self.outcome = Outcome()
        self.offers = {
            f"own-{n}": offer_of(f"own-{n}", ReplicaKind.DEDICATED) for n in range(DEDICATED)
        }
        for n in range(trace.guests):
            self.offers[f"guest-{n}"] = offer_of(f"guest-{n}", ReplicaKind.GUEST)

    def run(self, limit_s: float = 20_000.0) -> Outcome:
        """Until all steps are done; `done_s` stays infinite when they never are."""
        now_s = 0.0
        while now_s < limit_s:
            now_s += TICK_S
            self.begin_step(now_s)
            self.take_back(now_s)
            self.lease(now_s)
            self.decode(now_s)
            if self.step >= self.trace.steps and not self.left:
                self.outcome.done_s = now_s
                break
        return self.outcome

    def begin_step(self, now_s: float) -> None:
        if self.left or now_s < self.idle_until_s or self.step >= self.trace.steps:
            return
        self.step += 1
        # A long tail: a few turns of a batch are several times as long as most.
        self.left = [
            self.trace.mean_tokens * min(8.0, 0.3 + self.random.paretovariate(1.5) / 2)
            for _ in range(self.trace.turns)
        ]

    def is_offered(self, name: str, now_s: float) -> bool:
        return name.startswith("own") or self.trace.offered(int(name.split("-")[1]), now_s)

    def take_back(self, now_s: float) -> None:
        for name, holding in list(self.held.items()):
            if not self.is_offered(name, now_s):
                guests = sum(each.startswith("guest") for each in self.held)
                del self.held[name]
                self.outcome.revokes += 1
                self.policy.revoked(holding, guests, now_s)

    def lease(self, now_s: float) -> None:
        free = tuple(
            each
            for name, each in self.offers.items()
            if name not in self.held and self.is_offered(name, now_s)
        )
        demand = JobDemand("job", len(self.left), sum(self.left), self.step)
        decision = self.policy.decide(Situation(now_s, free, tuple(self.held.values()), (demand,)))
        for move in decision.give_back:
            del self.held[move.replica]
            self.outcome.returns += 1
            self.outcome.changes_at_s.append(now_s)
        for move in decision.take:
            offer = self.offers[move.replica]
            self.held[move.replica] = Holding("job", offer, now_s)
            self.ready_s[move.replica] = now_s + self.trace.switch_s
            self.policy.switched(offer, self.trace.switch_s)
            if offer.kind is ReplicaKind.GUEST:
                self.outcome.takes += 1
                self.outcome.changes_at_s.append(now_s)

    def decode(self, now_s: float) -> None:
        """Longest first, a place each; a place decodes at its share of the replica's rate."""
        ready = [name for name in self.held if self.ready_s[name] <= now_s]
        self.outcome.guest_s += TICK_S * sum(name.startswith("guest") for name in self.held)
        if not self.left:
            return
        rate_tok_s = 800.0 / PLACES
        self.left.sort(reverse=True)
        served = PLACES * len(ready)
        self.left = [
            left - rate_tok_s * TICK_S if place < served else left
            for place, left in enumerate(self.left)
        ]
        self.left = [left for left in self.left if left > 0]
        if not self.left:
            self.idle_until_s = now_s + self.trace.train_s

"""What a policy decides over, and what it decides."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_scheduler.offer import Offer


@dataclass(frozen=True, slots=True)
class JobDemand:
    """What a job has to do now; infinite where nobody said, which means all that there is.

    `turns` run or wait, `owed_tokens` are still to be made by them, `step` is the policy version
    that its trajectories work with, `weight` the operator's priority.
    """

    job: str
    turns: float = math.inf
    owed_tokens: float = math.inf
    step: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"the weight of {self.job} is {self.weight}; give one above 0")

    def cleaned(self) -> "JobDemand":
        """NaN and negative figures, as an idle meter may give them, are no work."""
        turns = self.turns if self.turns > 0 else 0.0
        owed = self.owed_tokens if self.owed_tokens > 0 else 0.0
        return JobDemand(self.job, turns, owed, self.step, self.weight)


@dataclass(frozen=True, slots=True)
class Holding:
    """An active lease, with its replica's newest offer."""

    job: str
    offer: Offer
    since_s: float


@dataclass(frozen=True, slots=True)
class Situation:
    """One moment: offers that may be leased, leases that may be kept, and the jobs."""

    now_s: float
    free: tuple[Offer, ...]
    held: tuple[Holding, ...]
    jobs: tuple[JobDemand, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Lease a replica to a job, or give it back, and why."""

    job: str
    replica: str
    why: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to change now; nothing is the usual case."""

    take: tuple[Move, ...] = ()
    give_back: tuple[Move, ...] = ()

"""Trainer of a simulation: what a training step needs, how long it takes, and what it publishes."""

import math
from dataclasses import dataclass
from enum import StrEnum

from rose.simulation.cluster import ClusterError


class Algorithm(StrEnum):
    """Kind of training.

    GRPO   groups of samples; a step waits for its whole batch
    DAPO   GRPO that over-samples and drops groups whose scores are all equal (arXiv 2503.14476)
    """

    GRPO = "grpo"
    DAPO = "dapo"


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """One training job.

    groups, samples: a step trains on so many prompts with so many trajectories each.
    max_staleness: versions that a token may be behind (0: synchronous). over_sampling: share of
    prompts started beyond the need (DAPO). tail_batching: short and long rounds (RollPacker).
    train_s: seconds of a step without tokens; train_s_per_token: seconds per token of a batch, on
    all training cards together. weight_bytes: of the policy; delta_share: of them that a version
    sends. publish_s: until a version is durable, besides sending it. max_turn_tokens: the most that
    one turn may make, which is all that a router knows of it before. steps: to simulate.
    """

    groups: int
    samples: int
    train_s_per_token: float
    weight_bytes: int
    algorithm: Algorithm = Algorithm.GRPO
    max_staleness: int = 0
    concurrency: int = 1_024
    over_sampling: float = 0.0
    tail_batching: bool = False
    train_s: float = 1.0
    delta_share: float = 0.05
    publish_s: float = 0.5
    max_turn_tokens: int = 4_096
    steps: int = 5

    def __post_init__(self) -> None:
        for key in ("groups", "samples", "weight_bytes", "concurrency", "max_turn_tokens", "steps"):
            if getattr(self, key) < 1:
                raise ClusterError(key, f"{getattr(self, key)}; give 1 or more")
        for key in ("train_s_per_token", "train_s", "publish_s", "over_sampling", "delta_share"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ClusterError(key, f"{value}; give 0 or more")
        if self.max_staleness < 0:
            raise ClusterError("max_staleness", f"{self.max_staleness}; give 0 or more")
        if not 0 < self.delta_share <= 1:
            raise ClusterError("delta_share", f"{self.delta_share}; give a share above 0, up to 1")

    @property
    def batch(self) -> int:
        """Trajectories of a step."""
        return self.groups * self.samples

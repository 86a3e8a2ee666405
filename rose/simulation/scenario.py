"""Scenario: cluster, workloads and trainer of one run.

serving hosts (each may have a guest)   dedicated replicas   training cards
        └──────── serving network ───────────┴── slow link ──────┘
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from rose.simulation.checked import CHECKED, Count, CountOrNone, NotNegative, Positive, Share
from rose.simulation.engine_specs import EngineFigures
from rose.simulation.workloads.episodes import RolloutWorkload
from rose.simulation.workloads.traffic import ServingWorkload
from slo import SloSpec


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class GuestSpec:
    """Guest beside a host: its engine at its largest, and its operator's limits.

    kv_base_tokens: KV memory of its own; beyond it the host's idle memory is lent, up to
    `engine.kv_tokens`. slack_share: share of the host's slack that is lent (0: host-idle time
    only). kv_headroom: share of the host's KV memory that is never lent. startup_s: seconds until a
    new engine is warm. granule_tokens: KV tokens whose memory is mapped together. token_budget:
    most tokens of a step. wake_s: seconds until a guest that was refused sees that it may run.
    """

    engine: EngineFigures
    kv_base_tokens: Count
    slack_share: Share = 0.5
    kv_headroom: Share = 0.2
    startup_s: NotNegative = 5.0
    granule_tokens: Count = 1_024
    token_budget: Count = 2_048
    wake_s: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.kv_base_tokens > self.engine.kv_tokens:
            raise ValueError(f"kv_base_tokens is {self.kv_base_tokens}; more than kv_tokens")


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class HostPool:
    """Equal serving engines, the latencies promised to their users, and the guest beside each (None
    for no guests).
    """

    hosts: Count
    engine: EngineFigures
    slo: SloSpec
    guest: GuestSpec | None = None

    def __post_init__(self) -> None:
        if self.guest is not None and self.guest.engine.cards != self.engine.cards:
            raise ValueError(
                f"guest.engine.cards is {self.guest.engine.cards}; its host has {self.engine.cards}"
            )

    @property
    def cards(self) -> int:
        """Number of cards of all serving hosts in the pool."""
        return self.hosts * self.engine.cards


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class DedicatedReplicas:
    """Equal rollout engines on cards that serve no users."""

    replicas: CountOrNone
    engine: EngineFigures

    @property
    def cards(self) -> int:
        """Number of cards of all dedicated rollout replicas."""
        return self.replicas * self.engine.cards


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class Links:
    """Speeds of a cluster's links.

    slow_bytes_s: bytes per second from the trainer to other clusters. near_bytes_s: bytes per
    second at which a node receives inside a cluster. latency_s: seconds of a message. apply_s:
    seconds to activate a version.
    """

    slow_bytes_s: Positive = 2.5e9
    near_bytes_s: Positive = 12.5e9
    latency_s: NotNegative = 0.001
    apply_s: NotNegative = 0.5


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class ClusterSpec:
    """All cards of a scenario: hosts with their guests, dedicated replicas, training cards.

    serving: None for a cluster that borrows nothing.
    """

    dedicated: DedicatedReplicas
    training_cards: CountOrNone
    serving: HostPool | None = None
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        if self.dedicated.replicas == 0 and (self.serving is None or self.serving.guest is None):
            raise ValueError("dedicated.replicas is 0, and no host has a guest: nothing rolls out")

    @property
    def cards(self) -> int:
        """Number of cards of the whole cluster: hosts, dedicated replicas and training."""
        serving = self.serving.cards if self.serving else 0
        return serving + self.dedicated.cards + self.training_cards


class Algorithm(StrEnum):
    """Training algorithm of a job.

    GRPO: groups of samples; a step waits for its whole batch. DAPO: GRPO that over-samples and
    drops groups whose scores are all equal (arXiv 2503.14476).
    """

    GRPO = "grpo"
    DAPO = "dapo"


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class TrainerSpec:
    """One training job.

    groups, samples: a step trains on so many prompts with so many trajectories each.
    max_staleness: versions that a token may be behind (0: synchronous). over_sampling: share of
    prompts started beyond the need (DAPO). tail_batching: short and long rounds (RollPacker).
    parts: groups are trained on as they are complete, while others of the step roll out; not where
    groups are dropped, or training cards roll out.
    train_s: seconds of a step without tokens; train_s_per_token: seconds per token of a batch, on
    all training cards together. weight_bytes: of the policy; delta_share: of them that a version
    sends. publish_s: until a version is durable, besides sending it. max_turn_tokens: the most that
    one turn may make, which is all that a router knows of it before. steps: to simulate.
    """

    groups: Count
    samples: Count
    train_s_per_token: NotNegative
    weight_bytes: Count
    algorithm: Algorithm = Algorithm.GRPO
    max_staleness: CountOrNone = 0
    concurrency: Count = 1_024
    over_sampling: NotNegative = 0.0
    tail_batching: Annotated[bool, Field(strict=True)] = False
    parts: Annotated[bool, Field(strict=True)] = False
    train_s: NotNegative = 1.0
    delta_share: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.05
    publish_s: NotNegative = 0.5
    max_turn_tokens: Count = 4_096
    steps: Count = 5

    @property
    def batch(self) -> int:
        """Number of trajectories that a step trains on."""
        return self.groups * self.samples

    @property
    def filters(self) -> bool:
        """True if groups whose scores are all equal are dropped."""
        return self.algorithm is Algorithm.DAPO

    @property
    def started_groups(self) -> int:
        """Number of groups that a step starts at once, over-sampling included."""
        return math.ceil(self.groups * (1 + self.over_sampling)) if self.filters else self.groups

    @property
    def delta_bytes(self) -> float:
        """Number of bytes that a version sends."""
        return self.weight_bytes * self.delta_share

    def seconds(self, tokens: float) -> float:
        """Return the seconds of training on a batch of so many tokens."""
        return self.train_s + self.train_s_per_token * tokens


@dataclass(frozen=True, slots=True)
class Scenario:
    """Input of a run. until_s: virtual time at which it ends at the latest, with or without all
    steps done.

    traffic: users' requests, None for hosts without users. slice_s: length of the slices of results
    over time. assumptions: sentences that tables print beside figures.
    """

    name: str
    cluster: ClusterSpec
    trainer: TrainerSpec
    rollouts: RolloutWorkload
    traffic: ServingWorkload | None = None
    until_s: float = 3_600.0
    slice_s: float = 10.0
    assumptions: tuple[str, ...] = ()
    options: dict[str, float] = field(default_factory=dict)

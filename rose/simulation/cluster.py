"""Cluster of a simulation: cards, the engines on them, and the links between its parts.

serving hosts (each may have a guest)   dedicated replicas   training cards
        └──────── serving network ───────────┴── slow link ──────┘
"""

import math
from dataclasses import dataclass, field

from rose.simulation.step_times import StepTimes
from slo import SloSpec


class ClusterError(ValueError):
    """A cluster that cannot be: `key` names the figure."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


def _positive(key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(key, f"{value}; give a figure above 0")


def _not_negative(key: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ClusterError(key, f"{value}; give 0 or more")


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine: `cards` is its tensor parallel size; all figures are of its cards together.

    kv_tokens: KV cache, in tokens. kv_bytes_per_token, weight_bytes: of memory.
    max_sequences, max_step_tokens: of a step of continuous batching, prefill chunked to the latter.
    block_tokens: of a KV block; prefixes are cached by whole blocks.
    """

    model: str
    cards: int
    steps: StepTimes
    kv_tokens: int
    kv_bytes_per_token: int
    weight_bytes: int
    max_sequences: int = 256
    max_step_tokens: int = 2_048
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for key in (
            "cards",
            "kv_tokens",
            "kv_bytes_per_token",
            "weight_bytes",
            "max_sequences",
            "max_step_tokens",
            "block_tokens",
        ):
            _positive(key, getattr(self, key))
        if self.kv_tokens < self.block_tokens:
            raise ClusterError("kv_tokens", f"{self.kv_tokens}; one block has {self.block_tokens}")


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """Guest beside a host: its engine at its largest, and what the operator allows it.

    kv_base_tokens: KV memory of its own; beyond it the host's idle memory is lent, up to
    `engine.kv_tokens`. slack_share: of the host's slack (0: host-idle time only). kv_headroom:
    share of the host's KV memory that is never lent. startup_s: from nothing to a warm engine.
    granule_tokens: KV tokens whose memory comes and goes together. wake_s: until a guest that was
    refused sees that it may run.
    """

    engine: EngineSpec
    kv_base_tokens: int
    slack_share: float = 0.5
    kv_headroom: float = 0.2
    startup_s: float = 5.0
    granule_tokens: int = 1_024
    token_budget: int = 2_048
    wake_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("kv_base_tokens", "granule_tokens", "token_budget"):
            _positive(key, getattr(self, key))
        _not_negative("startup_s", self.startup_s)
        _not_negative("wake_s", self.wake_s)
        for key in ("slack_share", "kv_headroom"):
            if not 0 <= getattr(self, key) <= 1:
                raise ClusterError(key, f"{getattr(self, key)}; give a share in 0..1")
        if self.kv_base_tokens > self.engine.kv_tokens:
            raise ClusterError("kv_base_tokens", f"{self.kv_base_tokens}; more than kv_tokens")


@dataclass(frozen=True, slots=True)
class HostPool:
    """Equal serving engines, their promise to users, and the guest beside each (None: none)."""

    hosts: int
    engine: EngineSpec
    slo: SloSpec
    guest: GuestSpec | None = None

    def __post_init__(self) -> None:
        _positive("hosts", self.hosts)
        if self.guest is not None and self.guest.engine.cards != self.engine.cards:
            raise ClusterError(
                "guest.cards", f"{self.guest.engine.cards}; its host has {self.engine.cards}"
            )


@dataclass(frozen=True, slots=True)
class DedicatedPool:
    """Equal rollout engines on cards of their own."""

    replicas: int
    engine: EngineSpec

    def __post_init__(self) -> None:
        _not_negative("replicas", self.replicas)


@dataclass(frozen=True, slots=True)
class Links:
    """slow_bytes_s: from the trainer to other clusters; near_bytes_s: between cards of one cluster
    (what one node receives at). latency_s: of a message; apply_s: activating a version."""

    slow_bytes_s: float = 2.5e9
    near_bytes_s: float = 12.5e9
    latency_s: float = 0.001
    apply_s: float = 0.5

    def __post_init__(self) -> None:
        _positive("slow_bytes_s", self.slow_bytes_s)
        _positive("near_bytes_s", self.near_bytes_s)
        _not_negative("latency_s", self.latency_s)
        _not_negative("apply_s", self.apply_s)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Everything that computes: hosts with their guests, dedicated replicas, training cards.

    serving: None for a cluster that borrows nothing.
    """

    dedicated: DedicatedPool
    training_cards: int
    serving: HostPool | None = None
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        _not_negative("training_cards", self.training_cards)
        if self.dedicated.replicas == 0 and (self.serving is None or self.serving.guest is None):
            raise ClusterError("dedicated.replicas", "0, and no host has a guest: nobody rolls out")

    @property
    def cards(self) -> int:
        """Cards in all."""
        serving = self.serving.hosts * self.serving.engine.cards if self.serving else 0
        return serving + self.dedicated.replicas * self.dedicated.engine.cards + self.training_cards

"""The raw records of a run: one schema for each file.

Everything a report says is computed from these files. Times are CLOCK_MONOTONIC seconds.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from rose.load.records import ClientRequest, HostLatency
from rose.node.samples import GuestSample

# Names of events in `events.jsonl` from which claims are computed.
FORCED_REVOCATION = "forced_revocation"
GUEST_KILLED = "guest_killed"
CHUNK_REJECTED = "chunk_rejected"
EVALUATION = "eval"
TRAINER_DONE = "done"


class Turn(msgspec.Struct, frozen=True):
    """`turns.jsonl`: one generation call of a trajectory.

    `gap` gives, for each kind of segment, [sum of |engine logprob - trainer logprob|, tokens].
    """

    request_id: str
    trajectory: str | int
    group: str | int
    step: int | None
    turn: int
    start_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    versions: list[tuple[int, int, int]]
    segments: list[tuple[str, str, int, int]]
    attempts: int
    finish_reason: str
    gap: dict[str, tuple[float, int]]
    unstamped: int


class Step(msgspec.Struct, frozen=True):
    """`steps.jsonl`: one update of the policy; `version` is the one it published."""

    step: int
    start_s: float
    end_s: float
    reward_mean: float
    reward_n: int
    tokens: int
    trajectories: int
    spanning: int
    clip_fraction: float
    grad_norm: float
    version: int
    density: float
    full_bytes: int
    wire_bytes: int
    publish_s: float
    train_s: float


class Trajectory(msgspec.Struct, frozen=True):
    """`trajectories.jsonl`: one episode; `delivered` counts how often the trainer got it."""

    trajectory: str | int
    group: str | int
    step: int | None
    start_s: float
    end_s: float
    turns: int
    reward: float
    versions: list[int]
    delivered: int
    revoked_mid_turn: bool


class BlockStats(msgspec.Struct, frozen=True):
    """Counters at one moment; all of them only grow."""

    steps: int
    tokens: dict[str, int]
    host_busy_ns: int
    cpu_s: dict[str, float]


class BlockRecord(msgspec.Struct, frozen=True):
    """`blocks.jsonl`: one block of the plan as it ran."""

    block: int
    pair: int | None
    arm: Literal["leased", "frozen", "ceiling", "unmeasured"]
    segment: int | None
    start_s: float
    end_s: float
    start_stats: BlockStats
    end_stats: BlockStats

    @property
    def duration_s(self) -> float:
        """Wall time of the block."""
        return self.end_s - self.start_s

    @property
    def tokens(self) -> int:
        """Rollout tokens generated in the block, on all replicas."""
        return sum(self.end_stats.tokens.values()) - sum(self.start_stats.tokens.values())

    @property
    def steps(self) -> int:
        """Training steps finished in the block."""
        return self.end_stats.steps - self.start_stats.steps

    @property
    def host_busy_s(self) -> float:
        """Time the host was inside a step during the block."""
        return (self.end_stats.host_busy_ns - self.start_stats.host_busy_ns) / 1e9


class Activation(msgspec.Struct, frozen=True):
    """`activations.jsonl`: a replica tried to activate a version."""

    t_s: float
    replica: str
    kind: str
    version: int
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float | None
    pause_s: float
    apply_s: float
    wire_bytes: int
    changed: int


class Event(msgspec.Struct, frozen=True):
    """`events.jsonl`: something happened; the fields after `event` belong to some events only.

    `crossed` has a 0 or a 1 for each held-out map, in the order in which every run has them.
    """

    t_s: float
    source: str
    event: str
    which: str | None = None
    success: float | None = None
    n: int | None = None
    crossed: str | None = None
    started: int | None = None
    delivered: int | None = None
    lost: int | None = None
    duplicated: int | None = None
    signal: int | None = None


class MemorySample(msgspec.Struct, frozen=True):
    """`memory.jsonl`: memory of each process of the run (proportional set size)."""

    t_s: float
    bytes: dict[str, int]


class RunInfo(msgspec.Struct, frozen=True):
    """`run.json`: when the run began and ended, and what was asked of it."""

    t0_s: float
    settings: dict[str, bool | int | float | str | None]
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Records:
    """All raw records of one run."""

    run: RunInfo
    client_requests: list[ClientRequest]
    host_latency: list[HostLatency]
    turns: list[Turn]
    steps: list[Step]
    trajectories: list[Trajectory]
    blocks: list[BlockRecord]
    activations: list[Activation]
    events: list[Event]
    guest: list[GuestSample]
    memory: list[MemorySample]

    def blocks_of(self, arm: str) -> list[BlockRecord]:
        """The blocks of one arm in the order in which they ran."""
        return [block for block in self.blocks if block.arm == arm]

    def events_named(self, name: str) -> list[Event]:
        """The events of one name in order of time."""
        return sorted((e for e in self.events if e.event == name), key=lambda event: event.t_s)

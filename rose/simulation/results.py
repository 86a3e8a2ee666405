"""Results of a run: its steps, use of the cards, users' latencies, tail of the trajectories.

Every figure is finite: `RunResult.to_json` refuses any other, and what nobody measured is None.
"""

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class StepResult:
    """One training step. ended_s − started_s = rollout_s + train_s + sync_s.

    rollout_s: the trainer waits for its batch; train_s: it trains; sync_s: its new version travels
    and nothing else happens. output_tokens: generated for the batch that it trained on;
    borrowed_tokens: those of them that guests made. oldest: versions behind, of its oldest token.
    """

    number: int
    started_s: float
    ended_s: float
    rollout_s: float
    train_s: float
    sync_s: float
    trajectories: int
    output_tokens: int
    borrowed_tokens: int
    total_tokens: int
    oldest: int


@dataclass(frozen=True, slots=True)
class UseSlice:
    """Share of cards' time that was inside a step, by pool, in one slice of time.

    host: serving cards, of their own users' steps; guest: the same cards, of borrowed steps.
    """

    start_s: float
    host: float
    guest: float
    dedicated: float
    training: float


@dataclass(frozen=True, slots=True)
class SloSlice:
    """Users' requests that ended in one slice of time; attained of them met all targets."""

    start_s: float
    requests: int
    attained: int


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a figure; all 0 if `count` is 0."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of users."""

    requests: int
    attained: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    series: tuple[SloSlice, ...] = ()

    @property
    def attainment(self) -> float:
        """Share of requests that met all targets; 1 without any."""
        return self.attained / self.requests if self.requests else 1.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of one scenario under one policy: all that tables and plots are made of.

    steps_per_hour, tokens_per_s: of the whole run, the first step left out where there are more.
    trajectory_s: from start to reward; turn_s: of turns. tokens_per_s counts whole trajectories,
    prompts and observations included. overhead_share: of the time for which borrowed replicas were
    leased, the part before their first token. counts: of events (preemptions, revocations, ...).
    """

    scenario: str
    policy: str
    seed: int
    duration_s: float
    steps: tuple[StepResult, ...]
    tokens_per_s: float
    steps_per_hour: float
    trajectory_s: Percentiles
    turn_s: Percentiles
    users: Latencies | None
    use: tuple[UseSlice, ...]
    gpu_use: float
    borrowed_gpu_hours: float
    overhead_share: float
    counts: dict[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    fidelity: str = "steps"

    def to_json(self) -> str:
        """One JSON object. Raises ValueError for a figure that is not finite."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

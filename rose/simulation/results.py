"""Results of a run: its steps, use of the cards, users' latencies, tail of the trajectories.

Every figure is finite (`RunResult.to_json` refuses any other), or None if it was not measured.
"""

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slo import SloSpec


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one training step. ended_s − started_s = rollout_s + train_s + sync_s.

    rollout_s: seconds in which the trainer waits for its batch. train_s: seconds of training.
    sync_s: seconds in which only its new version travels. output_tokens: generated for the batch
    that it trained on. borrowed_tokens: those of them that guests made. total_tokens: prompts and
    observations included. oldest: number of versions that the oldest token is behind.
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

    @property
    def seconds(self) -> float:
        """Duration of the whole step in seconds."""
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class UseSlice:
    """Share of each pool's card time that was inside a step, in one slice of time that begins at
    `start_s`.

    host: serving cards in their users' steps. guest: the same cards in borrowed steps. dedicated:
    dedicated cards. training: training cards.
    """

    start_s: float
    host: float
    guest: float
    dedicated: float
    training: float


@dataclass(frozen=True, slots=True)
class SloSlice:
    """Number of users' requests that ended in one slice of time, and how many of them met all
    targets.
    """

    start_s: float
    requests: int
    attained: int


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Count, mean, percentiles and maximum of a figure; all 0 if `count` is 0."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class UserLatencies:
    """Latencies of users' requests: percentiles of TTFT and TPOT, and how many requests met their
    targets, over time too.
    """

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
    """Result of one run of one scenario under one policy; tables and plots are made of it alone.

    steps_per_hour, tokens_per_s: of the whole run, without the first step if there are more.
    tokens_per_s counts whole trajectories, prompts and observations included. trajectory_s: times
    from start to reward. turn_s: times of turns. gpu_use: share of all cards' time inside a step.
    overhead_share: share of borrowed replicas' leased time before their first token. counts:
    numbers of events (preemptions, revocations, …). fidelity: "steps" or "fluid".
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
    users: UserLatencies | None
    use: tuple[UseSlice, ...]
    gpu_use: float
    borrowed_gpu_hours: float
    overhead_share: float
    counts: dict[str, int] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    fidelity: str = "steps"

    @classmethod
    def of_steps(cls, steps: Sequence[StepResult], **figures: Any) -> "RunResult":  # noqa: ANN401
        """Return the result with tokens/s and steps/h computed from its steps, without the first if
        there are others. figures: the other fields.
        """
        # The first step alone waits for new leases and fills caches, so it does not count.
        counted = steps[1:] or steps
        took_s = sum(step.seconds for step in counted)
        tokens = sum(step.total_tokens for step in counted)
        return cls(
            steps=tuple(steps),
            tokens_per_s=tokens / took_s if took_s > 0 else 0.0,
            steps_per_hour=3_600 * len(counted) / took_s if took_s > 0 else 0.0,
            **figures,
        )

    def to_json(self) -> str:
        """Return the result as one JSON object.

        Raises ValueError for a figure that is not finite.
        """
        return json.dumps(asdict(self), indent=2, allow_nan=False)


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return count, mean, maximum and percentiles by the nearest rank; all 0 without values."""
    if not values:
        return Percentiles(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]

    mean = math.fsum(ordered) / len(ordered)
    return Percentiles(len(ordered), mean, at(0.5), at(0.9), at(0.99), ordered[-1])


class LatencyBook:
    """Collector of users' latencies, against their targets, in slices of `slice_s` seconds."""

    def __init__(self, slo: SloSpec, slice_s: float) -> None:
        self._slo = slo
        self._slice_s = slice_s
        self._slices: dict[int, list[int]] = {}
        self._ttft_s = array("d")
        self._tpot_s = array("d")

    def served(self, at_s: float, ttft_s: float, tpot_s: float | None) -> None:
        """Count a request that was served at `at_s`. tpot_s: None for an answer of one token."""
        attained = ttft_s <= self._slo.ttft_s and (tpot_s or 0.0) <= self._slo.tpot_s
        self._ttft_s.append(ttft_s)
        if tpot_s is not None:
            self._tpot_s.append(tpot_s)
        counts = self._slices.setdefault(int(at_s // self._slice_s), [0, 0])
        counts[0] += 1
        counts[1] += attained

    def latencies(self) -> UserLatencies:
        """Return percentiles and attainment of all requests so far, and the attainment of each
        slice.
        """
        series = tuple(
            SloSlice(number * self._slice_s, requests, attained)
            for number, (requests, attained) in sorted(self._slices.items())
        )
        return UserLatencies(
            len(self._ttft_s),
            sum(each.attained for each in series),
            percentiles(self._ttft_s),
            percentiles(self._tpot_s),
            series,
        )

"""Workloads: requests of a serving cluster's users, and trajectories of a training job.

Both are read lazily and in order, so that a week of traffic never lies in memory, and both are
known before the run: every policy of a comparison is given the same ones.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a user to the serving cluster.

    arrival_s: after the beginning. prefix: name of a prompt's beginning that others share, ""
    for none, and prefix_tokens its length. host: index of the host that it goes to, None where the
    cluster's balancer chooses. Raises ValueError for a request that cannot be.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    host: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"arrival_s is {self.arrival_s}; give 0 or more seconds")
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"a request of {self.prompt_tokens} prompt and {self.output_tokens} output tokens;"
                " give at least one of each"
            )
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError(f"prefix_tokens is {self.prefix_tokens}; give 0 to prompt_tokens")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a trajectory: it appends `observed_tokens`, then generates `output_tokens`.

    environment_s: that tools or the environment take after it; 0 after the last turn.
    tool: name of what was called, "" for none; `failed`: its result was an error.
    """

    observed_tokens: int
    output_tokens: int
    environment_s: float = 0.0
    tool: str = ""
    failed: bool = False

    def __post_init__(self) -> None:
        if self.observed_tokens < 0 or self.output_tokens < 1:
            raise ValueError(
                f"a turn of {self.observed_tokens} observed and {self.output_tokens} output tokens;"
                " give 0 or more, and at least one"
            )
        if not (math.isfinite(self.environment_s) and self.environment_s >= 0):
            raise ValueError(f"environment_s is {self.environment_s}; give 0 or more seconds")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: the first turn's observation is its prompt. reward_s: judging it takes.

    shared_tokens: of the prompt, the same in all trajectories of its group. score: what training
    on it would be told; DAPO-like filters drop groups whose scores are all equal.
    """

    turns: tuple[Turn, ...]
    reward_s: float = 0.0
    shared_tokens: int = 0
    score: float = 0.0

    def __post_init__(self) -> None:
        if not self.turns or not self.turns[0].observed_tokens:
            raise ValueError("a trajectory has at least one turn, and its first one a prompt")

    @property
    def output_tokens(self) -> int:
        """Tokens generated in all."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """Tokens of its last context: prompt, observations and outputs."""
        return sum(turn.observed_tokens + turn.output_tokens for turn in self.turns)


class ServingWorkload(Protocol):
    """Traffic of a serving cluster, in order of arrival."""

    def requests(self, seed: int) -> Iterator[Request]:
        """The same requests for the same seed; may be endless."""
        ...


class RolloutWorkload(Protocol):
    """Episodes of a training job; a prompt that starts anew plays the same ones."""

    def trajectory(self, seed: int, prompt: int, sample: int) -> Trajectory:
        """Sample `sample` of prompt `prompt`; the same for the same seed, whatever was asked
        before."""
        ...

"""What a trainer is handed: complete groups, and those that were given up."""

from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingGroup(Generic[P, T]):
    """One prompt's trajectories, by sample index. `oldest_version` is that of its oldest token,
    None when it has no token; `restarts` counts how often the prompt aged out before."""

    prompt: P
    samples: tuple[T, ...]
    oldest_version: int | None
    restarts: int


@dataclass(frozen=True, slots=True)
class DroppedGroup(Generic[P]):
    """A prompt that is not trained on: a sample's episode failed, the last time with `error`."""

    prompt: P
    error: BaseException


@dataclass(frozen=True, slots=True)
class TrainingStep(Generic[P, T]):
    """Train from policy `version`: every token of every group is within the bound there.

    dropped: prompts given up since the step before. Fewer groups than planned, or none: the
    prompts are used up.
    """

    version: int
    groups: tuple[TrainingGroup[P, T], ...]
    dropped: tuple[DroppedGroup[P], ...]

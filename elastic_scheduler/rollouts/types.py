"""Types of the rollout buffer: samples, groups, the plan of a step, training steps and progress.

`SampleRun` is one try at one sample of one prompt, `GroupSamples` the samples of a prompt.
A trainer sets the `StepPlan` and receives a `TrainingStep`: complete groups, and the prompts that
were given up.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from elastic_scheduler.rollouts.admission import StalenessBound
from elastic_scheduler.rollouts.batching import BatchPolicy, PromptQueue, TailBatcher, TailPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampleRun:
    """`life`: how often the prompt was started; `attempt`: how often this sample in that life."""

    prompt: int
    life: int
    sample: int
    attempt: int

    @property
    def group(self) -> str:
        """A name that all samples of this life of the prompt share, and no others."""
        return f"{self.prompt}.{self.life}"

    @property
    def name(self) -> str:
        """A name that no other run has."""
        return f"{self.group}.{self.sample}.{self.attempt}"


@dataclass(slots=True)
class GroupSamples(Generic[T]):
    """A prompt's samples in one life: `need` of those that were started."""

    need: int
    runs: dict[int, SampleRun]
    done: dict[int, T] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether it has what it needs."""
        return len(self.done) >= self.need

    @property
    def hopeless(self) -> bool:
        """Whether too many samples were lost."""
        return len(self.done) + len(self.runs) < self.need

    def is_live(self, run: SampleRun) -> bool:
        """Whether anybody waits for the run."""
        return self.runs.get(run.sample) == run

    def values(self) -> tuple[T, ...]:
        """What the samples made, by index."""
        return tuple(self.done[sample] for sample in sorted(self.done))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step trains on `groups` prompts with `samples` trajectories each, all within `bound`.

    concurrency: episodes that run at once. retries: of a sample whose episode failed; then its
    group is dropped. restarts: how often a prompt may age out before steps wait for it.
    """

    groups: int
    samples: int
    bound: StalenessBound
    concurrency: int = 256
    retries: int = 2
    restarts: int = 1
    tail: TailPlan | None = None

    def __post_init__(self) -> None:
        if min(self.groups, self.samples, self.concurrency) < 1:
            raise ValueError("StepPlan: groups, samples and concurrency of at least 1")
        if min(self.retries, self.restarts) < 0:
            raise ValueError("StepPlan: retries and restarts of at least 0")

    def line(self) -> BatchPolicy:
        """An empty line of prompts: rounds where the tail is batched, else one after the other."""
        if self.tail is None:
            return PromptQueue(self.samples)
        return TailBatcher(self.tail, self.groups, self.samples)


P = TypeVar("P")


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


@dataclass(slots=True)
class RolloutCounts:
    """Groups trained (handed out), dropped, aged out (begun anew because the policy moved on) and
    deferred (moved to a long round); samples retried. They only grow."""

    trained: int = 0
    dropped: int = 0
    aged_out: int = 0
    deferred: int = 0
    retried: int = 0


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """A rollout buffer now; the last five are its `RolloutCounts`."""

    version: int
    prompts_waiting: int
    groups_running: int
    groups_ready: int
    samples_running: int
    samples_waiting: int
    trained: int
    dropped: int
    aged_out: int
    deferred: int
    retried: int

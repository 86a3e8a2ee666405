"""One try at one sample of one prompt, and the samples of a group."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

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

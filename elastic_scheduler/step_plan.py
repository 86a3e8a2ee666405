"""What a trainer's steps are made of, and what may be spent on them."""

from dataclasses import dataclass

from elastic_scheduler.prompt_queue import PromptLine, PromptQueue
from elastic_scheduler.staleness import StalenessBound
from elastic_scheduler.tail_batching import TailBatcher, TailPlan


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

    def line(self) -> PromptLine:
        """An empty line of prompts: rounds where the tail is batched, else one after the other."""
        if self.tail is None:
            return PromptQueue(self.samples)
        return TailBatcher(self.tail, self.groups, self.samples)

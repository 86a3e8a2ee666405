"""Rounds that do not wait for their slowest: the long tail is moved to rounds of its own.

After RollPacker (arXiv 2509.21009): a short round starts more prompts, and more samples of each,
than it needs, is complete with the first that are done, and puts the prompts that are not at the
end of a queue. When the queue fills a round, a long round runs them without over-sampling, to
their ends. So a prompt is trained on exactly once; only its round changes.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TailPlan:
    """Prompts and samples that a round must have, and how many more a short one starts."""

    prompts: int
    samples: int
    more_prompts: float = 0.25
    more_samples: float = 0.25

    def __post_init__(self) -> None:
        if min(self.prompts, self.samples) < 1 or min(self.more_prompts, self.more_samples) < 0:
            raise ValueError("a round needs prompts and samples of at least 1, and shares >= 0")


@dataclass(frozen=True, slots=True)
class Round:
    """Start `samples` of each prompt; the round is over when enough of them are complete."""

    prompts: tuple[str, ...]
    samples: int
    is_long: bool


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Train on `delivered`, (prompt, the samples that were done first); cancel everything else."""

    delivered: tuple[tuple[str, tuple[int, ...]], ...]
    deferred: tuple[str, ...]


class TailBatcher:
    """Forms rounds from a stream of prompts, one round at a time."""

    def __init__(self, plan: TailPlan) -> None:
        self._plan = plan
        self._fresh: deque[str] = deque()
        self._deferred: deque[str] = deque()
        self._round: Round | None = None
        self._done: dict[str, list[int]] = {}
        self._complete: list[str] = []

    @property
    def deferred(self) -> int:
        """Prompts that wait for a long round."""
        return len(self._deferred)

    def add(self, prompts: Iterable[str]) -> None:
        """Prompts to be trained on, each once; names must not repeat."""
        self._fresh.extend(prompts)

    def begin(self, *, last: bool = False) -> Round | None:
        """The next round; None while one runs or prompts are missing.

        `last`: no more prompts will come, so that what is left runs to its end.
        """
        plan = self._plan
        if self._round is not None:
            return None
        over = math.ceil(plan.prompts * (1 + plan.more_prompts))
        if len(self._deferred) >= plan.prompts:
            names = [self._deferred.popleft() for _ in range(plan.prompts)]
            self._round = Round(tuple(names), plan.samples, True)
        elif len(self._fresh) >= over:
            names = [self._fresh.popleft() for _ in range(over)]
            samples = math.ceil(plan.samples * (1 + plan.more_samples))
            self._round = Round(tuple(names), samples, False)
        elif last and (self._deferred or self._fresh):
            rest = [*self._deferred, *self._fresh]
            self._deferred.clear()
            self._fresh = deque(rest[plan.prompts :])
            self._round = Round(tuple(rest[: plan.prompts]), plan.samples, True)
        else:
            return None
        self._done = {name: [] for name in self._round.prompts}
        self._complete = []
        return self._round

    def sample_done(self, prompt: str, sample: int) -> RoundDone | None:
        """A sample is complete; the round's end if it was the last that it needed.

        Late samples of a round that is over, and those beyond what a prompt needs, are void.
        """
        done = self._done.get(prompt)
        if self._round is None or done is None or sample in done:
            return None
        if len(done) >= self._plan.samples:
            return None
        done.append(sample)
        if len(done) == self._plan.samples:
            self._complete.append(prompt)
        if len(self._complete) < min(self._plan.prompts, len(self._round.prompts)):
            return None
        return self._close()

    def _close(self) -> RoundDone:
        assert self._round is not None
        deferred = tuple(name for name in self._round.prompts if name not in self._complete)
        delivered = tuple((name, tuple(self._done[name])) for name in self._complete)
        self._deferred.extend(deferred)
        self._round, self._done, self._complete = None, {}, []
        return RoundDone(delivered, deferred)

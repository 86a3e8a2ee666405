"""Batch policies: the order in which prompts start, and the rounds in which they are trained on.

`PromptQueue` starts prompts one by one, those that aged out first, and delivers all that finish.

`TailBatcher` moves the long tail of generation lengths to rounds of its own, after RollPacker
(arXiv 2509.21009), so that a step does not wait for its slowest prompt. A short round starts more
prompts, and more samples of each, than it needs. It is complete with the first that are done, and
the other prompts go to the end of a queue. When the queue fills a round, a long round runs them
without over-sampling, to their ends. So a prompt is trained on exactly once, in one round or the
other.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Round:
    """Action: start `samples` of each prompt.

    `spares` stand by: as many prompts finish as are in `prompts`, in any order.
    """

    prompts: tuple[int, ...]
    samples: int
    spares: tuple[int, ...] = ()
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Action: train on `delivered`; cancel `deferred`, whose prompts wait for a later round."""

    delivered: tuple[int, ...]
    deferred: tuple[int, ...] = ()


class BatchPolicy(Protocol):
    """Policy of batches: which prompts start together, and when finished ones are trained on."""

    @property
    def waiting(self) -> int:
        """Prompts that have not started or must start anew."""
        ...

    def add(self, prompt: int) -> None:
        """Add a prompt to be trained on; numbers must not repeat."""
        ...

    def put_back(self, prompt: int) -> None:
        """Put a started prompt back that aged out: it starts anew before others."""
        ...

    def wanted(self, room: int) -> int:
        """Return the number of further prompts that could start now."""
        ...

    def begin(self, room: int, *, last: bool) -> Round | None:
        """Return the starts with room for this many groups. last: no more prompts will come."""
        ...

    def complete(self, prompt: int) -> RoundDone | None:
        """Record a prompt with all its samples; return the groups to train on by that."""
        ...

    def drop(self, prompt: int) -> RoundDone | None:
        """Drop a running prompt; return the groups to train on by that."""
        ...


class PromptQueue:
    """First come, first started; every finished prompt is delivered."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._queue: deque[int] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def add(self, prompt: int) -> None:
        self._queue.append(prompt)

    def put_back(self, prompt: int) -> None:
        self._queue.appendleft(prompt)

    def wanted(self, room: int) -> int:
        return max(0, room - len(self._queue))

    def begin(self, room: int, *, last: bool) -> Round | None:
        """Start one prompt at a time."""
        del last
        if room < 1 or not self._queue:
            return None
        return Round((self._queue.popleft(),), self._samples)

    def complete(self, prompt: int) -> RoundDone | None:
        """Deliver it: no prompt waits for another one."""
        return RoundDone((prompt,))

    def drop(self, prompt: int) -> RoundDone | None:
        """Drop it: no other prompt waits for this one."""
        del prompt
        return None


@dataclass(frozen=True, slots=True)
class TailPlan:
    """The share of prompts, and of samples of each, that a short round starts beyond its need."""

    more_prompts: float = 0.25
    more_samples: float = 0.25

    def __post_init__(self) -> None:
        if not (0 <= self.more_prompts <= 10 and 0 <= self.more_samples <= 10):
            raise ValueError("more_prompts and more_samples are shares: give 0 up to 10")


class TailBatcher:
    """Forms rounds of `prompts` (a step's) with `samples` each, one round at a time."""

    def __init__(self, plan: TailPlan, prompts: int, samples: int) -> None:
        if min(prompts, samples) < 1:
            raise ValueError("a round needs at least one prompt and one sample")
        self._plan = plan
        self._prompts = prompts
        self._samples = samples
        self._fresh: deque[int] = deque()
        self._deferred: deque[int] = deque()
        self._again: deque[int] = deque()
        self._round: Round | None = None
        # Prompts of the round: still in it, or with all their samples.
        self._members: dict[int, bool] = {}

    @property
    def waiting(self) -> int:
        return len(self._fresh) + len(self._deferred) + len(self._again)

    @property
    def deferred(self) -> int:
        """Number of prompts that wait for a long round."""
        return len(self._deferred)

    def add(self, prompt: int) -> None:
        self._fresh.append(prompt)

    def put_back(self, prompt: int) -> None:
        """Put an aged-out prompt back: into its round if that still runs, else into the next."""
        if prompt in self._members:
            self._members[prompt] = False
            self._again.append(prompt)
        else:
            self._fresh.appendleft(prompt)

    def wanted(self, room: int) -> int:
        """Return the number of further prompts that a round could start with."""
        need = self._need(room)
        if self._round is not None or len(self._deferred) >= need:
            return 0
        return max(0, _more(need, self._plan.more_prompts) - len(self._fresh))

    def begin(self, room: int, *, last: bool = False) -> Round | None:
        """Return the prompts of the running round that aged out, or the next round.

        None while a round runs or prompts are missing. last: no more prompts will come, so that the
        rest runs to its end. A round fills up a step if ready groups are too few for one.
        """
        need = self._need(room)
        if self._again:
            return self._start_again(self._again.popleft())
        if self._round is not None or need < 1:
            return None
        over = _more(need, self._plan.more_prompts)
        if len(self._deferred) >= need:
            self._round = Round(_popped(self._deferred, need), self._samples, is_long=True)
        elif len(self._fresh) >= over:
            samples = _more(self._samples, self._plan.more_samples)
            first = _popped(self._fresh, need)
            self._round = Round(first, samples, _popped(self._fresh, over - need))
        elif last and (self._deferred or self._fresh):
            rest = deque([*self._deferred, *self._fresh])
            self._deferred.clear()
            first = _popped(rest, min(need, len(rest)))
            self._fresh = rest
            self._round = Round(first, self._samples, is_long=True)
        else:
            return None
        self._members = dict.fromkeys([*self._round.prompts, *self._round.spares], False)
        return self._round

    def complete(self, prompt: int) -> RoundDone | None:
        """Record a prompt with its samples; return the round's end if it was the last needed."""
        self._members[prompt] = True
        return self._end()

    def drop(self, prompt: int) -> RoundDone | None:
        """Drop a prompt of the round; the round may end by that."""
        del self._members[prompt]
        return self._end()

    def _end(self) -> RoundDone | None:
        assert self._round is not None
        delivered = tuple(prompt for prompt, complete in self._members.items() if complete)
        if len(delivered) < min(len(self._round.prompts), len(self._members)):
            return None
        deferred = tuple(prompt for prompt, complete in self._members.items() if not complete)
        self._deferred.extend(deferred)
        self._again.clear()
        self._round, self._members = None, {}
        return RoundDone(delivered, deferred)

    def _start_again(self, prompt: int) -> Round:
        assert self._round is not None
        if prompt in self._round.spares:
            return Round((), self._round.samples, (prompt,), self._round.is_long)
        return Round((prompt,), self._round.samples, (), self._round.is_long)

    def _need(self, room: int) -> int:
        """Return the prompts that the next round must finish: ready groups leave room in steps."""
        return 0 if room < 1 else room % self._prompts or self._prompts


def _more(count: int, share: float) -> int:
    """Return `count` and a share of it, rounded up; the share may be off in binary."""
    return count + math.ceil(count * share - 1e-9)


def _popped(queue: deque[int], count: int) -> tuple[int, ...]:
    return tuple(queue.popleft() for _ in range(count))

"""Prompts in the order in which they start: each one by itself, those that aged out first."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Round:
    """Start `samples` of each prompt. `spares` stand by: as many prompts finish as are in
    `prompts`, whichever they are."""

    prompts: tuple[int, ...]
    samples: int
    spares: tuple[int, ...] = ()
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Train on `delivered`; cancel `deferred`, whose prompts wait for a later round."""

    delivered: tuple[int, ...]
    deferred: tuple[int, ...] = ()


class PromptLine(Protocol):
    """Which prompts start together, and when those that finish may be trained on."""

    @property
    def waiting(self) -> int:
        """Prompts that have not started or must start anew."""
        ...

    def add(self, prompt: int) -> None:
        """A prompt to be trained on; numbers must not repeat."""
        ...

    def put_back(self, prompt: int) -> None:
        """A prompt that started aged out: it starts anew before others."""
        ...

    def wanted(self, room: int) -> int:
        """More prompts that could start now, if there were any."""
        ...

    def begin(self, room: int, *, last: bool) -> Round | None:
        """What starts now with room for so many groups. `last`: no more prompts will come."""
        ...

    def complete(self, prompt: int) -> RoundDone | None:
        """A prompt has its samples; what may be trained on by that."""
        ...

    def drop(self, prompt: int) -> RoundDone | None:
        """A prompt that runs was given up; what may be trained on by that."""
        ...


class PromptQueue:
    """First come, first started; whatever finishes is delivered."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._queue: deque[int] = deque()

    @property
    def waiting(self) -> int:
        """As in PromptLine."""
        return len(self._queue)

    def add(self, prompt: int) -> None:
        """As in PromptLine."""
        self._queue.append(prompt)

    def put_back(self, prompt: int) -> None:
        """As in PromptLine."""
        self._queue.appendleft(prompt)

    def wanted(self, room: int) -> int:
        """As in PromptLine."""
        return max(0, room - len(self._queue))

    def begin(self, room: int, *, last: bool) -> Round | None:
        """As in PromptLine; one prompt at a time."""
        del last
        if room < 1 or not self._queue:
            return None
        return Round((self._queue.popleft(),), self._samples)

    def complete(self, prompt: int) -> RoundDone | None:
        """As in PromptLine: nobody waits for another prompt."""
        return RoundDone((prompt,))

    def drop(self, prompt: int) -> RoundDone | None:
        """As in PromptLine: no other prompt waits for this one."""
        del prompt
        return None

"""Fluid of a rollout phase: all episodes of a batch advance together, on shared engines.

Episode i has X_i tokens to make and e_i seconds of environment for each of them. While a token
takes s seconds it advances at 1 ÷ (s + e_i), and is in an engine for s ÷ (s + e_i) of the time. s
follows from how many are in engines: turns go where they are done first, so it is the same for
dedicated engines and for guests, which have a share h of their card:

    s = dedicated(n_d) = guest(n_g) ÷ h,   n_d × engines + n_g × guests = Σ s ÷ (s + e_i)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose.simulation.fluid.host_pool import StepLine
from rose.simulation.workload import Trajectory

Floats = NDArray[np.float64]
_ROUNDS = 30
# Largest part of what is left of the shortest episode that one tick advances.
_TICK_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Engines:
    """Equal engines; each batches at most `most` sequences, the others wait."""

    count: float
    line: StepLine
    most: float

    def in_one(self, token_s: float, share: float = 1.0) -> float:
        """Sequences in one of them while a token takes `token_s` and it has `share` of its card."""
        if share <= 0:
            return 0.0
        room = token_s * share - self.line.base_s
        if room <= 0:
            return 0.0
        if self.line.per_sequence_s <= 0:
            return math.inf
        sequences = room / self.line.per_sequence_s
        if sequences <= self.most:
            return sequences
        # Full: those in it take turns with those that wait.
        return self.most * token_s * share / self.line.seconds(self.most)


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """Episodes of a step. Arrays have one value each: tokens to make, environment per token."""

    output_tokens: Floats
    environment_s: Floats
    total_tokens: float
    prompt_per_output: float
    mean_context: float

    @classmethod
    def of(cls, episodes: Sequence[Trajectory]) -> "EpisodeBatch":
        """Of at least one episode."""
        output = np.array([e.output_tokens for e in episodes], dtype=np.float64)
        waits = np.array(
            [sum(t.environment_s for t in e.turns) + e.reward_s for e in episodes],
            dtype=np.float64,
        )
        total = float(sum(e.total_tokens for e in episodes))
        observed = total - float(output.sum())
        shared = sum(e.shared_tokens for e in episodes)
        context = sum(_context(e) for e in episodes) / float(output.sum())
        return cls(
            output,
            waits / output,
            total,
            max(0.0, observed - shared) / float(output.sum()),
            context,
        )


def _context(episode: Trajectory) -> float:
    """Sum over an episode's tokens of the context that each attends to."""
    total, before = 0.0, 0
    for turn in episode.turns:
        before += turn.observed_tokens
        total += turn.output_tokens * (before + turn.output_tokens / 2)
        before += turn.output_tokens
    return total


@dataclass(frozen=True, slots=True)
class RolloutPhase:
    """How a phase went: its length, when each episode ended, tokens that guests made, use."""

    seconds: float
    ends_s: Floats
    output_tokens: float
    borrowed_tokens: float
    dedicated_busy_s: float
    guest_busy_s: float


def roll_out(
    batch: EpisodeBatch,
    dedicated: Engines,
    guests: Engines | None,
    guest_share: Callable[[float], float],
    slots: int,
    longest_tick_s: float,
) -> RolloutPhase:
    """Run all episodes to their ends.

    guest_share: of a card that a guest has at a moment of the phase, 0 to 1. slots: episodes at a
    time; the rest begin as others end. Raises ValueError when nothing could ever advance.
    """
    left = batch.output_tokens.copy()
    ends = np.zeros(len(left))
    alive = np.zeros(len(left), dtype=bool)
    alive[:slots] = True
    begun = min(slots, len(left))
    now_s = borrowed = busy_d = busy_g = 0.0
    while alive.any():
        share = guest_share(now_s) if guests is not None else 0.0
        waits = batch.environment_s[alive]
        token_s = token_time(waits, dedicated, guests, share)
        if not math.isfinite(token_s):
            raise ValueError("no engine has a card to roll out on")
        pace = 1.0 / (token_s + waits)
        tick_s = min(longest_tick_s, _tick_s(left[alive], pace))
        left[alive] -= pace * tick_s
        now_s += tick_s
        on_dedicated = dedicated.count * dedicated.in_one(token_s)
        on_guests = guests.count * guests.in_one(token_s, share) if guests is not None else 0.0
        made = float(pace.sum()) * tick_s
        borrowed += made * on_guests / max(1e-12, on_dedicated + on_guests)
        busy_d += tick_s * min(1.0, on_dedicated / max(1e-12, dedicated.count))
        if guests is not None:
            busy_g += tick_s * share * min(1.0, on_guests / max(1e-12, guests.count))
        ended = np.flatnonzero(alive & (left <= 1e-9))
        ends[ended] = now_s
        alive[ended] = False
        more = min(len(ended), len(left) - begun)
        alive[begun : begun + more] = True
        begun += more
    return RolloutPhase(now_s, ends, float(batch.output_tokens.sum()), borrowed, busy_d, busy_g)


def token_time(waits: Floats, dedicated: Engines, guests: Engines | None, share: float) -> float:
    """Seconds of a token, such that as many sequences are in engines as are not waiting.

    Both sides are monotone: a longer time has room for more in the engines, and more are in them.
    Infinite when no engine has anything of a card.
    """

    def room(token_s: float) -> float:
        found = dedicated.count * dedicated.in_one(token_s) if dedicated.count else 0.0
        return found + (guests.count * guests.in_one(token_s, share) if guests else 0.0)

    low = _fastest(dedicated, guests, share)
    if not math.isfinite(low):
        return math.inf
    high = low
    for _ in range(_ROUNDS):
        high *= 2
        if room(high) >= float((high / (high + waits)).sum()):
            break
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if room(middle) < float((middle / (middle + waits)).sum()):
            low = middle
        else:
            high = middle
    return high


def _fastest(dedicated: Engines, guests: Engines | None, share: float) -> float:
    """A token's time in an empty engine."""
    times = [dedicated.line.base_s] if dedicated.count else []
    if guests is not None and guests.count and share > 0:
        times.append(guests.line.base_s / share)
    return min(times, default=math.inf)


def _tick_s(left: Floats, pace: Floats) -> float:
    """Until the first episode ends, or a part of what the middle one still takes."""
    times = left / pace
    first = float(times.min())
    return max(first, float(np.median(times)) * _TICK_SHARE)

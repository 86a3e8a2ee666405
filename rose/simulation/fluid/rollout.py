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

from rose.simulation.cluster import EngineSpec
from rose.simulation.fluid.host_pool import GuestLoad, StepLine
from rose.simulation.workload import Trajectory
from slo import StepProfile

Floats = NDArray[np.float64]
_ROUNDS = 30
# Largest part of what is left of the shortest episode that one tick advances.
_TICK_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class EnginePool:
    """Equal engines that roll out."""

    count: float
    engine: EngineSpec
    profile: StepProfile

    def at(self, context_tokens: float, prefill_per_output: float) -> "Engines":
        """While their sequences have such contexts, each token of which brings prompt tokens."""
        line = StepLine.of(self.profile, context_tokens, prefill_per_output)
        most = min(self.engine.max_sequences, self.engine.kv_tokens / max(1.0, context_tokens))
        return Engines(self.count, line, max(1.0, most))


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines of a pool at one moment; each batches at most `most` sequences, the others wait."""

    count: float
    line: StepLine
    most: float

    def in_one(self, token_s: float, share: float = 1.0) -> float:
        """Sequences in one of them while a token takes `token_s` and it has `share` of its card.

        A sequence alone takes a step of one, so up to one there may be any number.
        """
        if share <= 0 or not self.count:
            return 0.0
        room = token_s * share - self.line.base_s
        if room <= 0:
            return 0.0
        if self.line.per_sequence_s <= 0:
            return self.most
        sequences = room / self.line.per_sequence_s
        if sequences <= self.most:
            return sequences
        # Full: those in it take turns with those that wait.
        return self.most * token_s * share / self.line.seconds(self.most)


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """Episodes of a step. Arrays have one value each: tokens to make, environment per token, the
    context at the beginning and what it grows by for each token made.
    """

    output_tokens: Floats
    environment_s: Floats
    first_context: Floats
    growth: Floats
    prefill_per_output: float

    @classmethod
    def of(cls, episodes: Sequence[Trajectory], turn_s: float = 0.0) -> "EpisodeBatch":
        """Of at least one episode; turn_s: what messages of each turn take."""
        output = np.array([e.output_tokens for e in episodes], dtype=np.float64)
        waits = np.array([_waits_s(e, turn_s) for e in episodes], dtype=np.float64)
        first = np.array([e.turns[0].observed_tokens for e in episodes], dtype=np.float64)
        total = np.array([e.total_tokens for e in episodes], dtype=np.float64)
        shared = sum(e.shared_tokens for e in episodes)
        made = float(output.sum())
        prefill = max(0.0, float(total.sum()) - made - shared) / made
        return cls(output, waits / output, first, (total - first) / output, prefill)


def _waits_s(episode: Trajectory, turn_s: float) -> float:
    waits_s = sum(turn.environment_s for turn in episode.turns) + episode.reward_s
    return waits_s + turn_s * len(episode.turns)


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
    dedicated: EnginePool,
    guests: EnginePool | None,
    guest_share: Callable[[float, GuestLoad], float],
    slots: int,
    longest_tick_s: float,
) -> RolloutPhase:
    """Run all episodes to their ends.

    guest_share: of a card that a guest has at a moment of the phase, 0 to 1, with what it has to
    do. slots: episodes at a time; the rest begin as others end. Raises ValueError when nothing
    could ever advance.
    """
    size = len(batch.output_tokens)
    left = batch.output_tokens.copy()
    ends = np.zeros(size)
    alive = np.arange(size) < slots
    begun = min(slots, size)
    now_s = borrowed = busy_d = busy_g = 0.0
    load = GuestLoad(1.0, guests.profile.base_s) if guests is not None else GuestLoad(0.0, 0.0)
    while alive.any():
        share = guest_share(now_s, load) if guests is not None else 0.0
        waits = batch.environment_s[alive]
        made = batch.output_tokens[alive] - left[alive]
        context = float((batch.first_context[alive] + batch.growth[alive] * made).mean())
        own = dedicated.at(context, batch.prefill_per_output)
        lent = guests.at(context, batch.prefill_per_output) if guests is not None else None
        token_s = token_time(waits, own, lent, share)
        if not math.isfinite(token_s):
            if guests is None or longest_tick_s <= 0:
                raise ValueError("no engine has a card to roll out on")
            now_s += longest_tick_s
            continue
        pace = 1.0 / (token_s + waits)
        tick_s = min(longest_tick_s, _tick_s(left[alive], pace))
        left[alive] -= pace * tick_s
        now_s += tick_s
        on_own, on_lent = _placed(float((token_s * pace).sum()), own, lent, token_s, share)
        tokens = float(pace.sum()) * tick_s
        borrowed += tokens * on_lent / max(1e-12, on_own + on_lent)
        busy_d += tick_s * min(1.0, on_own / max(1e-12, own.count))
        if lent is not None and lent.count:
            in_one = on_lent / lent.count
            load = GuestLoad(min(1.0, in_one), lent.line.seconds(max(1.0, in_one)))
            busy_g += tick_s * share * load.duty
        ended = np.flatnonzero(alive & (left <= 1e-9))
        ends[ended] = now_s
        alive[ended] = False
        more = min(len(ended), size - begun)
        alive[begun : begun + more] = True
        begun += more
    return RolloutPhase(now_s, ends, float(batch.output_tokens.sum()), borrowed, busy_d, busy_g)


def _placed(
    wanted: float, dedicated: Engines, guests: Engines | None, token_s: float, share: float
) -> tuple[float, float]:
    """(sequences in dedicated engines, in guests): all of `wanted`, in parts as each has room."""
    own = dedicated.count * dedicated.in_one(token_s)
    lent = guests.count * guests.in_one(token_s, share) if guests is not None else 0.0
    scale = wanted / max(1e-12, own + lent)
    return own * scale, lent * scale


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
    """A token's time in an engine of its own."""
    times = [dedicated.line.seconds(1)] if dedicated.count else []
    if guests is not None and guests.count and share > 0:
        times.append(guests.line.seconds(1) / share)
    return min(times, default=math.inf)


def _tick_s(left: Floats, pace: Floats) -> float:
    """Until the first episode ends, or a part of what the middle one still takes."""
    times = left / pace
    first = float(times.min())
    return max(first, float(np.median(times)) * _TICK_SHARE)

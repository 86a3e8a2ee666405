"""Fluid of a rollout phase: all episodes of a batch advance together, on shared engines.

Episode i has X_i tokens to make and e_i seconds of environment for each of them. While a token
takes s seconds it advances at 1 ÷ (s + e_i), and is in an engine for s ÷ (s + e_i) of the time. s
follows from how many are in engines and where (`place`); guests have a share of their card:

    n_d × engines + n_g × guests = Σ s ÷ (s + e_i)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_scheduler.routing.router import STICKY_MARGIN
from rose.simulation.engine_specs import EngineFigures
from rose.simulation.fluid.hosts import NO_GUEST, GuestDuty, StepLine
from rose.simulation.workloads.episodes import RolloutEpisode

Floats = NDArray[np.float64]
_ROUNDS = 20
# A tick is at least this share of the median episode's remaining time.
_TICK_SHARE = 0.05
# The router leaves a turn where its prefix is unless elsewhere it costs a margin less.
STAY = 1 / (1 - STICKY_MARGIN)


@dataclass(frozen=True, slots=True)
class FluidPool:
    """Equal engines that roll out, `count` of them."""

    count: float
    engine: EngineFigures

    def at(self, context_tokens: float, prefill_per_output: float) -> "FluidEngines":
        """Return the pool's engines at a mean context, when each output token comes with so many
        prompt tokens.
        """
        line = StepLine.of(self.engine.profile, context_tokens, prefill_per_output)
        most = min(self.engine.max_sequences, self.engine.kv_tokens / max(1.0, context_tokens))
        return FluidEngines(self.count, line, max(1.0, most))


@dataclass(frozen=True, slots=True)
class FluidEngines:
    """Engines of a pool at one moment; each batches `most` sequences, the others wait."""

    count: float
    line: StepLine
    most: float

    @property
    def full_rate(self) -> float:
        """Tokens per second of one engine with a full batch."""
        return self.most / self.line.seconds(self.most)

    def token_s(self, sequences: float) -> float:
        """Return the seconds between two tokens of a sequence when an engine has this many, its
        queue included.
        """
        if sequences > self.most:
            return self.line.seconds(self.most) * sequences / self.most
        return self.line.seconds(max(1.0, sequences))

    def in_one(self, token_s: float, share: float = 1.0) -> float:
        """Return the number of sequences in one engine if a token takes `token_s` and the engine
        has `share` of its card.

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
        # The batch is full: its sequences take turns with those that wait.
        return self.most * token_s * share / self.line.seconds(self.most)


@dataclass(frozen=True, slots=True)
class EpisodeBatch:
    """Episodes of one training step, as arrays with a value for each episode.

    output_tokens: tokens to make. environment_s: seconds of environment per token. first_context:
    context at the beginning. growth: tokens by which the context grows for each token made.
    """

    output_tokens: Floats
    environment_s: Floats
    first_context: Floats
    growth: Floats
    prefill_per_output: float

    @classmethod
    def of(cls, episodes: Sequence[RolloutEpisode], turn_s: float = 0.0) -> "EpisodeBatch":
        """Return the batch of these episodes, at least one.

        turn_s: seconds that each turn's messages take.
        """
        output = np.array([e.output_tokens for e in episodes], dtype=np.float64)
        waits = np.array([_waits_s(e, turn_s) for e in episodes], dtype=np.float64)
        first = np.array([e.turns[0].observed_tokens for e in episodes], dtype=np.float64)
        total = np.array([e.total_tokens for e in episodes], dtype=np.float64)
        shared = sum(e.shared_tokens for e in episodes)
        made = float(output.sum())
        prefill = max(0.0, float(total.sum()) - made - shared) / made
        return cls(output, waits / output, first, (total - first) / output, prefill)


def _waits_s(episode: RolloutEpisode, turn_s: float) -> float:
    return sum(turn.environment_s for turn in episode.turns) + turn_s * len(episode.turns)


@dataclass(frozen=True, slots=True)
class RolloutPhase:
    """Result of a rollout phase. seconds: its length. ends_s: end of each episode. borrowed_tokens:
    those that guests made.

    dedicated_busy_s, guest_busy_s: seconds that one engine of each kind was busy on the average.
    """

    seconds: float
    ends_s: Floats
    output_tokens: float
    borrowed_tokens: float
    dedicated_busy_s: float
    guest_busy_s: float


def roll_out(
    batch: EpisodeBatch,
    dedicated: FluidPool,
    guests: FluidPool | None,
    guest_share: Callable[[float, GuestDuty], float],
    slots: int,
    longest_tick_s: float,
) -> RolloutPhase:
    """Run all episodes of a batch to their ends, and return the phase.

    guest_share: called with the phase's time and the guests' load, returns the share of a card (0
    to 1) that a guest has. slots: episodes at a time; the rest begin as others end. Raises
    ValueError if no engine could ever advance one.
    """
    size = len(batch.output_tokens)
    left = batch.output_tokens.copy()
    ends = np.zeros(size)
    alive = np.arange(size) < slots
    begun = min(slots, size)
    now_s = borrowed = busy_d = busy_g = 0.0
    load = GuestDuty(1.0, guests.engine.profile.base_s) if guests is not None else NO_GUEST
    while alive.any():
        share = guest_share(now_s, load) if guests is not None else 0.0
        waits = batch.environment_s[alive]
        made = batch.output_tokens[alive] - left[alive]
        context = float((batch.first_context[alive] + batch.growth[alive] * made).mean())
        own = dedicated.at(context, batch.prefill_per_output)
        lent = guests.at(context, batch.prefill_per_output) if guests is not None else None
        placed = place(waits, own, lent, share)
        token_s = placed.token_s
        if not math.isfinite(token_s):
            if guests is None or longest_tick_s <= 0:
                raise ValueError("no engine has a card to roll out on")
            now_s += longest_tick_s
            continue
        pace = 1.0 / (token_s + waits)
        tick_s = min(longest_tick_s, _tick_s(left[alive], pace))
        left[alive] -= pace * tick_s
        now_s += tick_s
        tokens = float(pace.sum()) * tick_s
        borrowed += tokens * placed.borrowed
        busy_d += tick_s * min(1.0, placed.on_dedicated / max(1e-12, own.count))
        if lent is not None and lent.count:
            in_one = placed.on_guests / lent.count
            load = GuestDuty(min(1.0, in_one), lent.token_s(in_one))
            busy_g += tick_s * share * load.duty
        ended = np.flatnonzero(alive & (left <= 1e-9))
        ends[ended] = now_s
        alive[ended] = False
        more = min(len(ended), size - begun)
        alive[begun : begun + more] = True
        begun += more
    return RolloutPhase(now_s, ends, float(batch.output_tokens.sum()), borrowed, busy_d, busy_g)


@dataclass(frozen=True, slots=True)
class Placement:
    """Division of sequences between engines: those in all dedicated engines, those in all guests,
    and a token's mean time.
    """

    on_dedicated: float
    on_guests: float
    token_s: float

    @property
    def borrowed(self) -> float:
        """Share of the sequences that guests have."""
        return self.on_guests / max(1e-12, self.on_dedicated + self.on_guests)


def place(
    waits: Floats, dedicated: FluidEngines, guests: FluidEngines | None, share: float
) -> Placement:
    """Return the placement of those sequences that are not in their environment on dedicated
    engines and guests.

    The router offers turns to replicas as they are fast with a full batch, of which guests tell the
    rate of a whole card; a turn stays where its prefix is until elsewhere it is done earlier by a
    margin. So guests have as many sequences as dedicated engines have, but no more than makes a
    token there take `STAY` times as long. A token takes infinitely long when no engine has anything
    of a card.
    """
    if not dedicated.count:
        return _place_on_guests(waits, guests, share)
    ratio = guests.full_rate / dedicated.full_rate if guests is not None else 0.0

    def at(own_s: float) -> Placement:
        own = dedicated.in_one(own_s)
        lent = 0.0
        if guests is not None and share > 0:
            lent = min(own * ratio, guests.in_one(own_s * STAY, share))
        on_own, on_lent = own * dedicated.count, lent * (guests.count if guests else 0.0)
        if not on_lent or guests is None:
            return Placement(on_own, 0.0, own_s)
        lent_s = guests.token_s(lent) / share
        return Placement(on_own, on_lent, (on_own * own_s + on_lent * lent_s) / (on_own + on_lent))

    low = dedicated.line.seconds(1)
    high = low
    for _ in range(_ROUNDS):
        if _fits(at(high), waits):
            break
        low, high = high, 2 * high
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(at(middle), waits) else (middle, high)
    return _scaled(at(high), waits)


def _place_on_guests(waits: Floats, guests: FluidEngines | None, share: float) -> Placement:
    """Return the placement of all sequences on guests, for a pool without dedicated engines."""
    if guests is None or not guests.count or share <= 0:
        return Placement(0.0, 0.0, math.inf)
    wanted = float(len(waits))
    for _ in range(_ROUNDS):
        token_s = guests.token_s(wanted / guests.count) / share
        wanted = (wanted + float((token_s / (token_s + waits)).sum())) / 2
    return Placement(0.0, wanted, guests.token_s(wanted / guests.count) / share)


def _fits(placed: Placement, waits: Floats) -> bool:
    wanted = float((placed.token_s / (placed.token_s + waits)).sum())
    return placed.on_dedicated + placed.on_guests >= wanted


def _scaled(placed: Placement, waits: Floats) -> Placement:
    """Return the placement with its numbers scaled down to the sequences that are there: engines
    with less than one each had room for more.
    """
    wanted = float((placed.token_s / (placed.token_s + waits)).sum())
    scale = wanted / max(1e-12, placed.on_dedicated + placed.on_guests)
    return Placement(placed.on_dedicated * scale, placed.on_guests * scale, placed.token_s)


def _tick_s(left: Floats, pace: Floats) -> float:
    """Return the seconds until the first episode ends, or 5% of the median episode's remaining time
    if that is longer.
    """
    times = left / pace
    first = float(times.min())
    return max(first, float(np.median(times)) * _TICK_SHARE)

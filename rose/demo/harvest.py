"""What the borrowed capacity gave: leased against frozen blocks, and the ceiling."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rose.demo.records import BlockRecord, Records
from rose.node.samples import GuestSample
from rose.stats import Estimate, Floats, estimate_of_sums, ratio_of_rates

SECONDS_PER_HOUR = 3_600
# A guest with a small batch waits for demand, not for its host: a third of its seats.
LEAST_RUNNING = 16


@dataclass(frozen=True, slots=True)
class ByArm:
    """One rate in each arm; None where the arm has no blocks."""

    leased: float | None
    frozen: float | None
    ceiling: float | None


@dataclass(frozen=True, slots=True)
class Harvest:
    """`gain` is rollout throughput leased over frozen; `ceiling` is host load off over frozen.

    `busy` is the host's busy share in frozen blocks. `idle_efficiency` is the guest's throughput
    when leased, as a share of what it has alone (at the ceiling) in the host's idle time; both
    while it holds `LEAST_RUNNING` turns or more.
    """

    gain: Estimate | None
    ceiling: float | None
    busy: Estimate | None
    idle_efficiency: Estimate | None
    steps_gain: Estimate | None
    pairs: int
    tokens_per_s: ByArm
    steps_per_hour: ByArm


def block_pairs(records: Records) -> list[tuple[BlockRecord, BlockRecord]]:
    """(leased, frozen) blocks of each complete pair."""
    frozen = {block.pair: block for block in records.blocks_of("frozen")}
    return [(b, frozen[b.pair]) for b in records.blocks_of("leased") if b.pair in frozen]


def _rate(blocks: Sequence[BlockRecord], amounts: Sequence[int]) -> float | None:
    duration_s = sum(block.duration_s for block in blocks)
    return sum(amounts) / duration_s if duration_s > 0 else None


def _tokens_per_s(blocks: Sequence[BlockRecord]) -> float | None:
    return _rate(blocks, [block.tokens for block in blocks])


def _steps_per_hour(blocks: Sequence[BlockRecord]) -> float | None:
    rate = _rate(blocks, [block.steps for block in blocks])
    return None if rate is None else rate * SECONDS_PER_HOUR


def _busy(frozen: Sequence[BlockRecord], seed: int) -> Estimate | None:
    """Share of time in which the host was inside a step."""
    if not frozen:
        return None
    times = [(block.host_busy_s, block.duration_s) for block in frozen]
    return ratio_of_rates(times, [(1.0, 1.0)] * len(times), seed)


def _gain(pairs: Sequence[tuple[BlockRecord, BlockRecord]], of: str, seed: int) -> Estimate | None:
    if not pairs or any(getattr(frozen, of) <= 0 for _, frozen in pairs):
        return None
    return ratio_of_rates(
        [(getattr(leased, of), leased.duration_s) for leased, _ in pairs],
        [(getattr(frozen, of), frozen.duration_s) for _, frozen in pairs],
        seed,
    )


class _AtWork:
    """The guest's samples, and the time between them in which it holds enough turns."""

    def __init__(self, samples: Sequence[GuestSample]) -> None:
        self._t_s = np.array([sample.t_s for sample in samples])
        self._tokens = np.array([sample.tokens_total for sample in samples])
        self._running = np.array([sample.running for sample in samples])
        self._busy_s = np.array([sample.host_busy_ns / 1e9 for sample in samples])

    def spent(self, block: BlockRecord, like: BlockRecord | None = None) -> tuple[float, ...]:
        """(tokens, seconds, seconds that the host was busy at these times of the block `like`)."""
        inside = np.flatnonzero((self._t_s >= block.start_s) & (self._t_s <= block.end_s))
        first, last = inside[:-1], inside[1:]
        enough = np.minimum(self._running[first], self._running[last]) >= LEAST_RUNNING
        first, last = first[enough], last[enough]
        busy_s = 0.0
        if like is not None and len(first):
            shift_s = like.start_s - block.start_s
            ends_s = (self._busy_at(self._t_s[at] + shift_s) for at in (last, first))
            busy_s = float(next(ends_s) - next(ends_s))
        tokens = (self._tokens[last] - self._tokens[first]).sum()
        return float(tokens), float((self._t_s[last] - self._t_s[first]).sum()), busy_s

    def _busy_at(self, t_s: Floats) -> float:
        return float(np.interp(t_s, self._t_s, self._busy_s).sum())


def _idle_efficiency(
    records: Records, pairs: Sequence[tuple[BlockRecord, BlockRecord]], seed: int
) -> Estimate | None:
    """Guest tokens/s when leased over (guest tokens/s at the ceiling x the host's idle share).

    The idle share is the frozen block's, at the times of the leased one that count: a guest that
    makes its host busier gains nothing by it.
    """
    samples = _AtWork(records.guest)
    lent = [samples.spent(leased, frozen) for leased, frozen in pairs]
    alone = [samples.spent(block) for block in records.blocks_of("ceiling")]
    if not all(sum(seconds for _, seconds, _ in arm) > 0 for arm in (lent, alone)):
        return None

    def efficiency(sums: Sequence[Floats]) -> Floats:
        both, ceiling = sums
        idle_s = both[..., 1] - both[..., 2]
        result: Floats = (both[..., 0] / idle_s) / (ceiling[..., 0] / ceiling[..., 1])
        return result

    return estimate_of_sums([lent, alone], efficiency, seed)


def harvest(records: Records, seed: int) -> Harvest:
    """Gain over complete pairs, with its interval over pairs."""
    pairs = block_pairs(records)
    arms = {arm: records.blocks_of(arm) for arm in ("leased", "frozen", "ceiling")}
    tokens = {arm: _tokens_per_s(blocks) for arm, blocks in arms.items()}
    steps = {arm: _steps_per_hour(blocks) for arm, blocks in arms.items()}
    above, below = tokens["ceiling"], tokens["frozen"]
    return Harvest(
        gain=_gain(pairs, "tokens", seed),
        ceiling=above / below if above is not None and below else None,
        busy=_busy(arms["frozen"], seed),
        idle_efficiency=_idle_efficiency(records, pairs, seed),
        steps_gain=_gain(pairs, "steps", seed),
        pairs=len(pairs),
        tokens_per_s=ByArm(**tokens),
        steps_per_hour=ByArm(**steps),
    )

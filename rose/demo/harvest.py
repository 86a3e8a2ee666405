"""What the borrowed capacity gave: leased against frozen blocks, and the ceiling."""

from collections.abc import Sequence
from dataclasses import dataclass

from rose.demo.records import BlockRecord, Records
from rose.stats import Estimate, Interval, ratio_of_rates

# Share of the host's idle time that the guest must turn into throughput.
REQUIRED_SHARE = 0.8
SECONDS_PER_HOUR = 3_600


@dataclass(frozen=True, slots=True)
class ByArm:
    """One rate in each arm; None where the arm has no blocks."""

    leased: float | None
    frozen: float | None
    ceiling: float | None


@dataclass(frozen=True, slots=True)
class Harvest:
    """`gain` is rollout throughput leased over frozen; `ceiling` is host load off over frozen.

    `idle_fraction` is 1 - the host's busy share in frozen blocks; `required_gain` is
    1 + 0.8 x idle x (ceiling - 1).
    """

    gain: float | None
    gain_ci95: Interval | None
    ceiling: float | None
    idle_fraction: float | None
    required_gain: float | None
    steps_gain: float | None
    steps_gain_ci95: Interval | None
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


def _idle_fraction(frozen: Sequence[BlockRecord]) -> float | None:
    duration_s = sum(block.duration_s for block in frozen)
    if duration_s <= 0:
        return None
    return 1 - sum(block.host_busy_s for block in frozen) / duration_s


def _gain(pairs: Sequence[tuple[BlockRecord, BlockRecord]], of: str, seed: int) -> Estimate | None:
    if not pairs or any(getattr(frozen, of) <= 0 for _, frozen in pairs):
        return None
    return ratio_of_rates(
        [(getattr(leased, of), leased.duration_s) for leased, _ in pairs],
        [(getattr(frozen, of), frozen.duration_s) for _, frozen in pairs],
        seed,
    )


def harvest(records: Records, seed: int) -> Harvest:
    """Gain over complete pairs, with its interval over pairs."""
    pairs = block_pairs(records)
    arms = {arm: records.blocks_of(arm) for arm in ("leased", "frozen", "ceiling")}
    tokens = {arm: _tokens_per_s(blocks) for arm, blocks in arms.items()}
    steps = {arm: _steps_per_hour(blocks) for arm, blocks in arms.items()}
    gain, steps_gain = _gain(pairs, "tokens", seed), _gain(pairs, "steps", seed)
    idle = _idle_fraction(arms["frozen"])
    above, below = tokens["ceiling"], tokens["frozen"]
    ceiling = above / below if above is not None and below else None
    required = None
    if idle is not None and ceiling is not None:
        required = 1 + REQUIRED_SHARE * idle * (ceiling - 1)
    return Harvest(
        gain=gain.value if gain else None,
        gain_ci95=gain.ci95 if gain else None,
        ceiling=ceiling,
        idle_fraction=idle,
        required_gain=required,
        steps_gain=steps_gain.value if steps_gain else None,
        steps_gain_ci95=steps_gain.ci95 if steps_gain else None,
        pairs=len(pairs),
        tokens_per_s=ByArm(**tokens),
        steps_per_hour=ByArm(**steps),
    )

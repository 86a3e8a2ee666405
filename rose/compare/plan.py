"""Blocks of a comparison: pairs of one with lending and one without, each in a drawn order. Pure.

Traffic changes over a day, so a block is compared with its neighbour in time alone, and neither
arm always comes first.
"""

import random
from dataclasses import dataclass

from rose.errors import ConfigError

MOST_PAIRS = 500
# Shorter ones are mostly settling, and hold too few requests to say anything.
LEAST_BLOCK_S, LONGEST_BLOCK_S = 10.0, 3_600.0
LEAST_SETTLE_S, LONGEST_SETTLE_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """pairs: of blocks. block_s: of each, measured. settle_s: after each switch, not measured."""

    pairs: int = 12
    block_s: float = 120.0
    settle_s: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.pairs <= MOST_PAIRS:
            raise ConfigError(f"--pairs {self.pairs}: give 2 to {MOST_PAIRS}")
        if not LEAST_BLOCK_S <= self.block_s <= LONGEST_BLOCK_S:
            raise ConfigError(
                f"--block-s {self.block_s:g}: give {LEAST_BLOCK_S:g} to {LONGEST_BLOCK_S:g}"
            )
        if not LEAST_SETTLE_S <= self.settle_s <= LONGEST_SETTLE_S:
            raise ConfigError(
                f"--settle-s {self.settle_s:g}: give {LEAST_SETTLE_S:g} to {LONGEST_SETTLE_S:g}"
            )

    @property
    def seconds(self) -> float:
        """Duration of the whole plan."""
        return 2 * self.pairs * (self.settle_s + self.block_s)


@dataclass(frozen=True, slots=True)
class Block:
    """One stretch of time; lends: whether the guests may work in it."""

    pair: int
    lends: bool
    begins_s: float


def blocks_of(plan: Plan) -> list[Block]:
    """All blocks in their order; begins_s: of the measurement, from the start on."""
    drawn = random.Random(plan.seed)  # noqa: S311 -- an order, no secret
    blocks: list[Block] = []
    for pair in range(plan.pairs):
        first = drawn.random() < 0.5
        for lends in (first, not first):
            began_s = len(blocks) * (plan.settle_s + plan.block_s)
            blocks.append(Block(pair, lends, began_s + plan.settle_s))
    return blocks

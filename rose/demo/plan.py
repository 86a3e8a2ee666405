"""The order of the experiment: which steps run in which arm, under which host load."""

import random
from dataclasses import dataclass
from typing import Literal

from rose.demo.settings import MIN_STEPS
from rose.errors import RoseError

Arm = Literal["leased", "frozen", "ceiling", "unmeasured"]

WARM_UP_STEPS = 1
STORM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive training steps under one condition.

    `leased`: host under load, guest lent. `frozen`: same arrivals, guest frozen.
    `ceiling`: host load off, guest lent. `unmeasured`: warm-up, or the storm of faults.
    """

    block: int
    pair: int | None
    arm: Arm
    segment: int | None
    steps: int
    storm: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """All blocks of a run in the order in which they run."""

    blocks: tuple[Block, ...]

    @property
    def steps(self) -> int:
        """Training steps of the whole run."""
        return sum(block.steps for block in self.blocks)

    @property
    def pairs(self) -> int:
        """Number of leased-frozen pairs."""
        return sum(block.arm == "leased" for block in self.blocks)


@dataclass(frozen=True, slots=True)
class _Shares:
    """How the steps of a run are divided."""

    pairs: int
    ceilings: int
    block_steps: int
    storm_steps: int


def _shares(steps: int, block_steps: int, most_ceilings: int) -> _Shares:
    """Divide `steps`; what does not fill a pair goes to the storm."""
    for ceilings in range(most_ceilings, 0, -1):
        left = steps - WARM_UP_STEPS - STORM_STEPS - ceilings * block_steps
        pairs = left // (2 * block_steps)
        if pairs >= ceilings:
            return _Shares(pairs, ceilings, block_steps, STORM_STEPS + left % (2 * block_steps))
    raise RoseError(
        f"{steps} steps in blocks of {block_steps} leave no leased-frozen pair;"
        f" ask for more than {WARM_UP_STEPS + STORM_STEPS + 3 * block_steps - 1} steps"
    )


def _leased_first(pairs: int, rng: random.Random) -> list[bool]:
    """Which pairs begin leased: as many as begin frozen, in random order.

    Balance keeps a drift over the run (shorter replies, warmer caches) out of the comparison.
    """
    order = [index % 2 == 0 for index in range(pairs)]
    if pairs % 2 and rng.random() < 0.5:
        order[-1] = not order[-1]
    rng.shuffle(order)
    return order


def plain_plan(arm: Arm, steps: int) -> Plan:
    """No experiment: every step in one arm."""
    return Plan((Block(0, None, arm, 0, steps),))


def make_plan(seed: int, steps: int, steps_per_block: int = 4, quick: bool = False) -> Plan:
    """The seeded plan of a run of `steps` steps.

    Raises `RoseError` when the steps do not hold one pair, one ceiling and the storm.
    """
    if steps < MIN_STEPS or steps_per_block < 1:
        raise RoseError(f"a plan needs at least {MIN_STEPS} steps, in blocks of at least 1")
    rng = random.Random(seed)  # noqa: S311 - an experiment's order, not a secret
    block_steps = 1 if quick else steps_per_block
    shares = _shares(steps, block_steps, most_ceilings=2 if quick else 3)
    leased_first = _leased_first(shares.pairs, rng)
    # Segment 0 belongs to the warm-up, segment k + 1 to both arms of pair k.
    blocks = [Block(0, None, "unmeasured", 0, WARM_UP_STEPS)]
    gaps = shares.ceilings + 1
    spread = [(index + 1) * shares.pairs // gaps for index in range(shares.ceilings)]
    for pair in range(shares.pairs):
        for _ in range(spread.count(pair)):
            blocks.append(Block(len(blocks), None, "ceiling", None, block_steps))
        arms: tuple[Arm, Arm] = ("leased", "frozen") if leased_first[pair] else ("frozen", "leased")
        for arm in arms:
            blocks.append(Block(len(blocks), pair, arm, pair + 1, block_steps))
    storm = Block(len(blocks), None, "unmeasured", shares.pairs + 1, shares.storm_steps, storm=True)
    return Plan((*blocks, storm))

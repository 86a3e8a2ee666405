"""Plan of the experiment: the blocks of guest arm and host load, and their lengths.

Measured blocks last so many seconds, whatever the machine: both arms of a pair then see the same
arrivals to the end, and a run takes as long on a slow machine as on a fast one.

`rose demo --compare` runs the same training twice for each of a few seeds, with the guest leased
throughout and without it: does learning on borrowed tokens end where dedicated tokens end? The
greedy success on the held-out maps is compared.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from bench.demo.cli import Control, DemoSettings

SEEDS = 3
MAX_DIFFERENCE = 0.08


@dataclass(frozen=True, slots=True)
class BlockPair:
    """Held-out success of one seed, with and without harvest."""

    seed: int
    with_harvest: float
    without: float

    @property
    def difference(self) -> float:
        """With minus without."""
        return self.with_harvest - self.without


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs; `verdict` judges the size of their mean difference."""

    pairs: tuple[BlockPair, ...]

    @property
    def mean_difference(self) -> float:
        """Mean over seeds of with minus without."""
        return sum(pair.difference for pair in self.pairs) / len(self.pairs)

    @property
    def verdict(self) -> str:
        """HOLDS or FAILS."""
        return "HOLDS" if abs(self.mean_difference) <= MAX_DIFFERENCE else "FAILS"


def run_compare(settings: DemoSettings, run_demo: Callable[[DemoSettings], int]) -> int:
    """Run all pairs, write `compare.json`, print it; 0 when the claim holds."""
    pairs = []
    for seed in range(settings.seed, settings.seed + SEEDS):
        success = {}
        for arm in ("leased", "frozen"):
            out = settings.out / f"seed-{seed}-{arm}"
            run_demo(replace(settings, compare=False, seed=seed, only=arm, out=out))
            success[arm] = _held_out(out)
        pairs.append(BlockPair(seed, success["leased"], success["frozen"]))
    comparison = Comparison(tuple(pairs))
    _write(comparison, settings.out)
    return int(comparison.verdict == "FAILS")


def _held_out(out: Path) -> float:
    report = json.loads((out / "report.json").read_text())
    return float(report["heldout"]["final"])


def _write(comparison: Comparison, out: Path) -> None:
    record = {
        "pairs": [asdict(pair) | {"difference": pair.difference} for pair in comparison.pairs],
        "mean_difference": comparison.mean_difference,
        "limit": MAX_DIFFERENCE,
        "verdict": comparison.verdict,
    }
    (out / "compare.json").write_text(json.dumps(record, indent=2) + "\n")
    table = Table(title="held-out success after training", box=None)
    for column in ("seed", "with harvest", "without", "difference"):
        table.add_column(column, justify="right")
    for pair in comparison.pairs:
        cells = (pair.with_harvest, pair.without, pair.difference)
        table.add_row(str(pair.seed), *(f"{cell:.3f}" for cell in cells))
    console = Console()
    console.print(table)
    console.print(
        f"mean difference {comparison.mean_difference:+.3f},"
        f" at most ±{MAX_DIFFERENCE}: {comparison.verdict}"
    )


Arm = Literal["leased", "frozen", "ceiling", "unmeasured"]

BLOCK_S = 8.0
PAIRS = 12
CEILINGS = 4
# Pairs of the control that needs latencies, and nothing else.
CONTROL_PAIRS = 5
# The first versions change little: a guest that ignores them is seen after a few steps.
WEIGHTS_STEPS = 12
LEARNING_STEPS = 40
QUICKSTART_S = 20.0
# Jobs that take turns differ by one turn at most: several of them make that a small part.
SHARING_S = 120.0
SHARING_STEPS = 2
# After the guest was killed training goes on without it.
STORM_STEPS = 2
REVOCATIONS = 13


@dataclass(frozen=True, slots=True)
class ExperimentBlock:
    """Some time under one condition, and at least until the run has taken `until_step` steps.

    `leased`: host under load, guest lent. `frozen`: same arrivals, guest frozen.
    `ceiling`: host load off, guest lent. `unmeasured`: lent under load, counted nowhere.
    `revocations`: so many in mid-turn, then a kill, then `STORM_STEPS` steps more.
    """

    block: int
    pair: int | None
    arm: Arm
    segment: int | None
    seconds: float = 0.0
    until_step: int = 0
    revocations: int = 0


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """All blocks of a run in the order in which they run."""

    blocks: tuple[ExperimentBlock, ...]

    @property
    def pairs(self) -> int:
        """Number of leased-frozen pairs."""
        return sum(block.arm == "leased" and block.pair is not None for block in self.blocks)


def plan_of(settings: DemoSettings) -> ExperimentPlan:
    """Return the plan of the settings."""
    if settings.only:
        return ExperimentPlan(
            (ExperimentBlock(0, None, settings.only, 0, until_step=settings.steps),)
        )
    if settings.control:
        return control_plan(settings.seed, settings.control)
    if settings.accept:
        return accept_plan(settings.seed, settings.steps)
    return quickstart_plan() if settings.jobs == 1 else sharing_plan()


def sharing_plan() -> ExperimentPlan:
    """Return a plan of several jobs with the guest, for some turns of each, and no faults."""
    return ExperimentPlan(
        (ExperimentBlock(0, None, "leased", 0, seconds=SHARING_S, until_step=SHARING_STEPS),)
    )


def quickstart_plan() -> ExperimentPlan:
    """Return a plan of the loop for a while, one revocation in mid-turn, one kill."""
    return ExperimentPlan(
        (
            ExperimentBlock(0, None, "leased", 0, seconds=QUICKSTART_S, until_step=2),
            ExperimentBlock(1, None, "leased", 1, revocations=1),
        )
    )


def accept_plan(seed: int, steps: int) -> ExperimentPlan:
    """Return pairs in balanced random order, ceilings between, the rest of `steps`, the storm."""
    rng = random.Random(seed)  # noqa: S311 - an experiment's order, not a secret
    # Segment 0 belongs to the warm-up, segment k + 1 to both arms of pair k.
    blocks = [ExperimentBlock(0, None, "unmeasured", 0, until_step=1)]
    spread = [(index + 1) * PAIRS // (CEILINGS + 1) for index in range(CEILINGS)]
    for pair, leased_first in enumerate(_leased_first(PAIRS, rng)):
        for _ in range(spread.count(pair)):
            blocks.append(ExperimentBlock(len(blocks), None, "ceiling", None, BLOCK_S))
        blocks += _pair(len(blocks), pair, leased_first)
    rest = ExperimentBlock(len(blocks), None, "unmeasured", PAIRS + 1, until_step=steps)
    return ExperimentPlan((*blocks, rest, _storm(len(blocks) + 1, PAIRS + 2)))


def control_plan(seed: int, control: Control) -> ExperimentPlan:
    """Return the part of the acceptance run that the claims which must notice need."""
    match control:
        case "lr0":
            return ExperimentPlan((ExperimentBlock(0, None, "leased", 0, until_step=3),))
        case "shuffled-advantage":
            return ExperimentPlan(
                (ExperimentBlock(0, None, "ceiling", None, until_step=LEARNING_STEPS),)
            )
        case "drop-token":
            return ExperimentPlan(
                (ExperimentBlock(0, None, "unmeasured", 0, until_step=1), _storm(1, 1))
            )
        case "naive":
            rng = random.Random(seed)  # noqa: S311 - an experiment's order, not a secret
            blocks = [ExperimentBlock(0, None, "unmeasured", 0, until_step=1)]
            for pair, leased_first in enumerate(_leased_first(CONTROL_PAIRS, rng)):
                blocks += _pair(len(blocks), pair, leased_first)
            return ExperimentPlan(tuple(blocks))
        case _:
            return ExperimentPlan(
                (ExperimentBlock(0, None, "ceiling", None, until_step=WEIGHTS_STEPS),)
            )


def _pair(first: int, pair: int, leased_first: bool) -> list[ExperimentBlock]:
    arms: tuple[Arm, Arm] = ("leased", "frozen") if leased_first else ("frozen", "leased")
    return [
        ExperimentBlock(first + at, pair, arm, pair + 1, BLOCK_S) for at, arm in enumerate(arms)
    ]


def _storm(block: int, segment: int) -> ExperimentBlock:
    return ExperimentBlock(block, None, "unmeasured", segment, revocations=REVOCATIONS)


def _leased_first(pairs: int, rng: random.Random) -> list[bool]:
    """Return True for each pair that begins leased: half of them, in random order.

    Balance keeps a drift over the run (shorter replies, warmer caches) out of the comparison.
    """
    order = [index % 2 == 0 for index in range(pairs)]
    if pairs % 2 and rng.random() < 0.5:
        order[-1] = not order[-1]
    rng.shuffle(order)
    return order

"""Plan of the experiment: the blocks of guest arm and host load, and their lengths.

Measured blocks last so many seconds, whatever the machine: both arms of a pair then see the same
arrivals to the end, and a run takes as long on a slow machine as on a fast one.

`rose demo --compare` runs the same training twice for each of a few seeds, with the guest leased
throughout and without it: does learning on borrowed tokens end where dedicated tokens end? The
greedy success on the held-out maps is compared.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from bench.common.checks import FAILS, text_table, verdict_of
from bench.demo.cli import Control, DemoSettings

SEEDS = 3
MAX_DIFFERENCE = 0.08
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


def run_compare(settings: DemoSettings, run_demo: Callable[[DemoSettings], int]) -> int:
    """Run all pairs, write `compare.json`, print it; return 0 when the claim holds."""
    pairs = []
    for seed in range(settings.seed, settings.seed + SEEDS):
        final = {}
        for arm in ("leased", "frozen"):
            out = settings.out / f"seed-{seed}-{arm}"
            run_demo(replace(settings, compare=False, seed=seed, only=arm, out=out))
            final[arm] = float(json.loads((out / "report.json").read_text())["heldout"]["final"])
        difference = final["leased"] - final["frozen"]
        pairs.append((seed, final["leased"], final["frozen"], difference))
    mean = sum(difference for *_, difference in pairs) / len(pairs)
    verdict = verdict_of(abs(mean), "at most", MAX_DIFFERENCE)
    names = ("seed", "with_harvest", "without", "difference")
    record = {
        "pairs": [dict(zip(names, pair, strict=True)) for pair in pairs],
        "mean_difference": mean,
        "limit": MAX_DIFFERENCE,
        "verdict": verdict,
    }
    (settings.out / "compare.json").write_text(json.dumps(record, indent=2) + "\n")
    head = [name.replace("_", " ") for name in names]
    rows = [[str(seed), *(f"{cell:.3f}" for cell in cells)] for seed, *cells in pairs]
    sys.stdout.write(text_table("held-out success after training", head, rows))
    sys.stdout.write(f"mean difference {mean:+.3f}, at most ±{MAX_DIFFERENCE}: {verdict}\n")
    return int(verdict == FAILS)


Arm = Literal["leased", "frozen", "ceiling", "unmeasured"]


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


Plan = list[ExperimentBlock]
"""Blocks of a run in the order in which they run."""


def plan_of(settings: DemoSettings) -> Plan:
    """Return the plan of the settings."""
    if settings.only:
        return [ExperimentBlock(0, None, settings.only, 0, until_step=settings.steps)]
    if settings.control:
        return control_plan(settings.seed, settings.control)
    if settings.accept:
        return accept_plan(settings.seed, settings.steps)
    return quickstart_plan() if settings.jobs == 1 else sharing_plan()


def sharing_plan() -> Plan:
    """Return a plan of several jobs with the guest, for some turns of each, and no faults."""
    return [ExperimentBlock(0, None, "leased", 0, seconds=SHARING_S, until_step=SHARING_STEPS)]


def quickstart_plan() -> Plan:
    """Return a plan of the loop for a while, one revocation in mid-turn, one kill."""
    return [
        ExperimentBlock(0, None, "leased", 0, seconds=QUICKSTART_S, until_step=2),
        ExperimentBlock(1, None, "leased", 1, revocations=1),
    ]


def accept_plan(seed: int, steps: int) -> Plan:
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
    return [*blocks, rest, _storm(len(blocks) + 1, PAIRS + 2)]


def control_plan(seed: int, control: Control) -> Plan:
    """Return the part of the acceptance run that the claims which must notice need."""
    warm_up = ExperimentBlock(0, None, "unmeasured", 0, until_step=1)
    match control:
        case "lr0":
            return [ExperimentBlock(0, None, "leased", 0, until_step=3)]
        case "shuffled-advantage":
            return [ExperimentBlock(0, None, "ceiling", None, until_step=LEARNING_STEPS)]
        case "drop-token":
            return [warm_up, _storm(1, 1)]
        case "naive":
            rng = random.Random(seed)  # noqa: S311 - an experiment's order, not a secret
            blocks = [warm_up]
            for pair, leased_first in enumerate(_leased_first(CONTROL_PAIRS, rng)):
                blocks += _pair(len(blocks), pair, leased_first)
            return blocks
        case _:
            return [ExperimentBlock(0, None, "ceiling", None, until_step=WEIGHTS_STEPS)]


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

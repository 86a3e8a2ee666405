"""`rose demo --compare`: does learning on borrowed tokens end where dedicated tokens end?

For each of a few seeds the same training runs twice, with the guest leased throughout and without
it, and the greedy success on the held-out maps is compared.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rose.demo.cli import DemoSettings

SEEDS = 3
MAX_DIFFERENCE = 0.08


@dataclass(frozen=True, slots=True)
class Pair:
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

    pairs: tuple[Pair, ...]

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
        pairs.append(Pair(seed, success["leased"], success["frozen"]))
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

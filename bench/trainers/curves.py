"""`python -m bench.trainers.curves WAY…`: rises of the reward, by trainer, mode and seed.

    trl-server  trl-async  verl-sync  verl-async

Each way has a fleet of its own for all its seeds; a seed is a run of its own, of the trainer as it
is released. Writes a record for each way after each seed, `curve-WAY.json`, so that seeds and ways
may be trained one by one; then the table and the picture of all records that are in the folder,
those of `trl_measure` included. Without a way it draws the records that are there. Exit code 0, 1
where a reward did not rise or a way has fewer seeds than wanted, 2 for bad input or a training that
does not work.
"""

import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.common.checks import text_table
from bench.common.report import DPI, OUT, machine, parser_of, put, reported, say
from bench.trainers.engines import thirds
from bench.trainers.policy import save_policy
from bench.trainers.stack import TrainerStack, save_trl_policy, train_trl, trainer_python
from bench.trainers.verl_run import train_verl

PROG = "bench.trainers.curves"

# A policy of random weights needs fewer steps to learn.
STEPS = {"trl-server": 27, "trl-async": 18, "verl-sync": 18, "verl-async": 12}
REWARDED = {"trl": "share of letters", "verl": "right sums, and digits"}
COLORS = {
    "trl-server": "#2a7f9e",
    "trl-async": "#e0a83a",
    "verl-sync": "#5a9e4b",
    "verl-async": "#b0527a",
}
# Names of the trainers for the difference of sampler and trainer, and for the age of samples.
DRIFTS = ("sampling/sampling_logp_difference/mean", "training/rollout_probs_diff_mean")
STALENESS = ("staleness/max", "training/off_policy/trajectory_staleness/max")


@dataclass(frozen=True, slots=True)
class Curve:
    """One training. rewards: of each step; drift: mean difference of sampler and trainer, of
    logprobs for TRL and of probabilities for verl; staleness: the oldest sample, in versions."""

    seed: int
    rewards: list[float]
    drift: float | None = None
    staleness: float | None = None

    @property
    def thirds(self) -> tuple[float, float]:
        """Mean reward of the first third of the steps, and of the last."""
        return thirds(self.rewards)

    @property
    def rose(self) -> bool:
        """True if the last third is above the first."""
        first, last = self.thirds
        return last > first


@dataclass(slots=True)
class CurveRecord:
    """All curves of one way, by seed."""

    way: str
    curves: dict[int, Curve] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, way: str) -> "CurveRecord":
        """Read it; one without curves where there is none.

        TRL's are read from what `trl_measure` wrote, where they were not trained here.
        """
        path, measured = _path(folder, way), folder / "trl.json"
        trainer, mode = way.split("-")
        found = list[Curve]()
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))["curves"]
            found = [Curve(**each) for each in kept]
        elif trainer == "trl" and measured.exists():
            runs = json.loads(measured.read_text(encoding="utf-8"))["runs"]
            mine = (run for run in runs if run["arm"] == mode)
            found = [Curve(run["seed"], run["rewards"], run["drift"]) for run in mine]
        return cls(way, {each.seed: each for each in found})

    def save(self, folder: Path) -> None:
        """Write it with the machine that it was made on."""
        curves = [self.curves[seed] for seed in sorted(self.curves)]
        record = {"way": self.way, "machine": machine(), "curves": curves}
        put(record, _path(folder, self.way), shown=False)

    def holds(self, seeds: int) -> bool:
        """Return True if `seeds` were trained, and all of them rose."""
        return len(self.curves) >= seeds and all(each.rose for each in self.curves.values())


def _path(folder: Path, way: str) -> Path:
    return folder / f"curve-{way}.json"


def curve(seed: int, steps: Sequence[Mapping[str, Any]], reward: str) -> Curve:
    """Return one training by the figures that its trainer logged for each step."""

    def found(names: Sequence[str]) -> list[float]:
        return [step[name] for step in steps for name in names if name in step]

    drifts, ages = found(DRIFTS), found(STALENESS)
    return Curve(
        seed,
        [step[reward] for step in steps if reward in step],
        fmean(drifts) if drifts else None,
        max(ages, default=None),
    )


def train(way: str, seeds: Sequence[int], steps: int, out: Path) -> None:
    """Train a way with each seed, on one fleet, and keep each in its record."""
    trainer, mode = way.split("-")
    python = trainer_python(trainer)
    with tempfile.TemporaryDirectory(prefix="rose-curves-") as name:
        root = Path(name)
        model = root / "model"
        save_trl_policy(model, python) if trainer == "trl" else save_policy(model)
        with TrainerStack(root / "fleet", model) as stack:
            stack.wait_ready()
            for seed in seeds:
                folder = root / f"seed-{seed}"
                if trainer == "trl":
                    environ = stack.environ(root=root / f"published-{seed}", take_over=True)
                    options = {"model": stack.model, "seed": seed, "steps": steps}
                    made = curve(
                        seed, train_trl(python, folder, environ, mode, **options), "reward"
                    )
                else:
                    rows = train_verl(stack, python, folder, mode, seed, steps)
                    made = curve(seed, rows, "critic/score/mean")
                record = CurveRecord.load(out, way)
                record.curves[seed] = made
                record.save(out)
                first, last = made.thirds
                say("curves", f"{way}, seed {seed}: {first:.3f} to {last:.3f}")


def table(records: Sequence[CurveRecord]) -> str:
    """Lay out rewards of first and last thirds, each seed's, with drift and age."""
    rows = []
    for record in records:
        for each in record.curves.values():
            first, last = each.thirds
            drift = "-" if each.drift is None else f"{each.drift:.2g}"
            age = "-" if each.staleness is None else f"{each.staleness:g}"
            counts = str(len(each.rewards)), f"{first:.3f}", f"{last:.3f}"
            rows.append((f"{record.way}, seed {each.seed}", *counts, drift, age))
    header = ("training", "steps", "first third", "last third", "drift", "oldest")
    return text_table("rewards", header, rows)


def draw(records: Sequence[CurveRecord]) -> Figure:
    """Draw rewards by step, one picture for each way: a line for each seed, and their mean."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(8, 5.2), layout="constrained")
        for axes, record in zip(figure.subplots(2, 2).flat, records, strict=False):
            color, rewards = COLORS[record.way], [c.rewards for c in record.curves.values()]
            for each in rewards:
                axes.plot(range(1, len(each) + 1), each, color=color, lw=1, alpha=0.5)
            if rewards:
                means = [fmean(step) for step in zip(*rewards, strict=False)]
                axes.plot(range(1, len(means) + 1), means, color=color, lw=2.2)
            else:
                axes.text(0.5, 0.5, "not trained", ha="center", transform=axes.transAxes)
            trainer, mode = record.way.split("-")
            name = {"trl": "TRL", "verl": "verl"}[trainer]
            axes.set(title=f"{name}, {mode}: {len(rewards)} seeds", xlabel="step")
            axes.set_ylabel(f"reward: {REWARDED[trainer]}")
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Train, then draw all that is there."""
    parser = parser_of(__doc__, PROG, OUT / "trainers", seeds=3)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(STEPS))
    parser.add_argument("--seed", type=int, help="that one alone")
    parser.add_argument("--steps", type=int, help="instead of each way's own number")
    args = parser.parse_args(argv)
    if unknown := [way for way in args.ways if way not in STEPS]:
        parser.error(f"no way {unknown[0]!r}; choose from {', '.join(STEPS)}")
    seeds = range(args.seeds) if args.seed is None else [args.seed]
    # The fleet and the trainer end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def run() -> int:
        for way in args.ways:
            train(way, seeds, args.steps or STEPS[way], args.out.absolute())
        records = [CurveRecord.load(args.out, way) for way in STEPS]
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "curves.txt").write_text(table(records), encoding="utf-8")
        draw(records).savefig(args.out / "curves.png", dpi=DPI)
        sys.stdout.write(table(records))
        judged = [each for each in records if each.way in (args.ways or STEPS)]
        return int(not all(each.holds(len(seeds)) for each in judged))

    return reported("curves", run)


if __name__ == "__main__":
    sys.exit(main())

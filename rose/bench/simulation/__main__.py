"""`python -m rose.bench.simulation`: measures a host's loads again and again, and validates by it.

measure     starts engines, plays every load five times alone and five times beside a guest
extract     takes a measured run from the raw records of a co-serving run
validate    plays a measured run in the simulator, and shows its error beside the repeats' spread
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rose.bench.coserve.plan import (
    ALL_ARMS,
    ALONE,
    IDLE_ROSE,
    BenchSettings,
    Cell,
    PlanBlock,
    quick_settings,
)
from rose.bench.simulation.measured import LENDING, MeasuredRun, extract, read_measured
from rose.bench.simulation.validate import table, validate
from rose.cli.output import Format, View, write

MEASURED = Path("bench/results/simulation/measured.json")
REPEATS = 5
BUSY_TARGETS = (0.3, 0.6)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rose.bench.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    measure = commands.add_parser("measure", help="start engines and measure; ten minutes")
    measure.add_argument("--seed", type=int, default=0)
    measure.add_argument("--raw", type=Path, default=Path("out/bench/simulation"), metavar="DIR")
    measure.add_argument("--out", type=Path, default=MEASURED, metavar="FILE")
    measure.set_defaults(run=_measure)
    take = commands.add_parser("extract", help="of raw records of `python -m rose.bench.coserve`")
    take.add_argument("raw", type=Path, metavar="DIR")
    take.add_argument("--out", type=Path, default=MEASURED, metavar="FILE")
    take.set_defaults(run=_extract)
    check = commands.add_parser("validate", help="play a measured run in the simulator")
    check.add_argument("measured", type=Path, nargs="?", default=MEASURED, metavar="FILE")
    check.set_defaults(run=_validate)
    return parser


def _measure(args: argparse.Namespace) -> int:
    # Imported here: validating needs no engine.
    from rose.bench.coserve.run import run_bench

    settings = quick_settings(
        args.raw, seed=args.seed, busy_targets=BUSY_TARGETS, event_rounds=0, calibration_s=9.0
    )
    run_bench(settings, repeated_blocks)
    return _extract(args)


def repeated_blocks(settings: BenchSettings, cells: list[Cell]) -> list[PlanBlock]:
    """Every load several times with the same arrivals, alone and lending, in random order."""
    rng = random.Random(f"rose-repeats/{settings.seed}")  # noqa: S311 - an order, not a secret
    blocks = [
        PlanBlock(arm, settings.block_s, number, 1_000 * (1 + at), cell)
        for number in range(REPEATS)
        for at, cell in enumerate(cells)
        for arm in (ALONE, ALL_ARMS[LENDING])
    ]
    blocks += [PlanBlock(IDLE_ROSE, settings.idle_block_s, n, 0) for n in range(REPEATS)]
    rng.shuffle(blocks)
    return blocks


def _extract(args: argparse.Namespace) -> int:
    found: MeasuredRun = extract(args.raw)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.encode(found) + b"\n")
    sys.stdout.write(f"{len(found.loads)} loads in {args.out}\n")
    return 0


def _validate(args: argparse.Namespace) -> int:
    measured = read_measured(args.measured)
    rows = validate(measured)
    held = sum(row.holds for row in rows if not row.calibrated)
    predicted = sum(not row.calibrated for row in rows)
    lines = (
        f"{measured.machine}, seed {measured.seed}: {held} of {predicted} predictions hold"
        " (latencies inside the spread of repeats, tokens/s within 10%)",
    )
    write(View({}, lines, (table(rows),)), Format.TABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.simulation`: measures a host's loads again and again, and validates by it.

measure     starts engines, plays every load five times alone and five times beside a guest
trace       writes a generated trace in the Azure format, as uneven as the recorded one of 2023
extract     takes a measured run from the raw records of a co-serving run
validate    plays a measured run in the simulator, and shows its error beside the repeats' spread
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.coserve.plan import (
    ALL_ARMS,
    ALONE,
    IDLE_ROSE,
    BenchSettings,
    Cell,
    PlanBlock,
    quick_settings,
)
from bench.simulation.measured import LENDING, extract, read_measured, write_measured
from bench.simulation.validate import summary, table, validate
from rose.azure_trace import COLUMNS
from rose.command_line.output import Format, View, write
from rose.simulation.workloads.serving import AZURE_CODE_2023, CODE_DAY, HOUR_S

MEASURED = Path("bench/results/simulation/measured.json")
REPEATS = 5
BUSY_TARGETS = (0.3, 0.6)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    measure = commands.add_parser("measure", help="start engines and measure; ten minutes")
    measure.add_argument("--seed", type=int, default=0)
    measure.add_argument("--raw", type=Path, default=Path("out/bench/simulation"), metavar="DIR")
    measure.add_argument("--out", type=Path, default=MEASURED, metavar="FILE")
    measure.set_defaults(run=_measure)
    take = commands.add_parser("extract", help="of raw records of `python -m bench.coserve`")
    take.add_argument("raw", type=Path, nargs="+", metavar="DIR")
    take.add_argument("--out", type=Path, default=MEASURED, metavar="FILE")
    take.set_defaults(run=_extract)
    trace = commands.add_parser("trace", help="for `rose sim what-if`, where there is no other")
    trace.add_argument("--out", type=Path, required=True, metavar="FILE")
    trace.add_argument("--seed", type=int, default=0)
    trace.add_argument("--hours", type=float, default=1.0, metavar="N")
    trace.add_argument("--day", action="store_true", help="with the shape of a day; at 0:00")
    trace.set_defaults(run=_trace)
    check = commands.add_parser("validate", help="play a measured run in the simulator")
    check.add_argument("measured", type=Path, nargs="?", default=MEASURED, metavar="FILE")
    check.set_defaults(run=_validate)
    return parser


def _measure(args: argparse.Namespace) -> int:
    # Imported here: validating needs no engine.
    from bench.coserve.run import run_bench

    settings = quick_settings(
        args.raw, seed=args.seed, busy_targets=BUSY_TARGETS, event_rounds=0, calibration_s=9.0
    )
    run_bench(settings, repeated_blocks)
    args.raw = [args.raw]
    return _extract(args)


def repeated_blocks(settings: BenchSettings, cells: list[Cell]) -> list[PlanBlock]:
    """Return every load several times, alone and lending, in random order."""
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
    runs = [extract(folder) for folder in args.raw]
    write_measured(runs, args.out)
    loads = sum(len(run.loads) for run in runs)
    sys.stdout.write(f"{loads} loads of {len(runs)} runs in {args.out}\n")
    return 0


def _trace(args: argparse.Namespace) -> int:
    began = datetime(2026, 1, 5, tzinfo=UTC)
    with args.out.open("w", encoding="utf-8") as file:
        file.write(",".join(COLUMNS) + "\n")
        traffic = replace(AZURE_CODE_2023, day=CODE_DAY) if args.day else AZURE_CODE_2023
        for request in traffic.requests(args.seed):
            if request.arrival_s > args.hours * HOUR_S:
                break
            moment = began + timedelta(seconds=request.arrival_s)
            lengths = f"{request.prompt_tokens},{request.output_tokens}"
            file.write(f"{moment:%Y-%m-%d %H:%M:%S.%f},{lengths}\n")
    return 0


def _validate(args: argparse.Namespace) -> int:
    rows = [row for run in read_measured(args.measured) for row in validate(run)]
    write(View({}, tuple(summary(rows)), (table(rows),)), Format.TABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.coserve run|report|verify`.

Exit code 0 when done, 1 when a limit fails or a figure differs, 2 for bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.common.report import reported
from bench.coserve.plan import BUSY_TARGETS, BenchSettings, quick_settings
from bench.coserve.result import render, verify, write_result
from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.engines import EngineKind

DEFAULT_OUT = Path("out/bench/coserve")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    work = {"run": _run, "report": _report, "verify": _verify}[args.command]
    return reported("bench", lambda: work(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.coserve", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write result and plots")
    run.add_argument("--quick", action="store_true", help="the same rows in a quarter of an hour")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--trace", type=Path, metavar="FILE", help="bursts of this Azure trace (CSV)")
    run.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR")
    run.add_argument(
        "--lent-priority",
        choices=("background", "normal"),
        default="background",
        help="how the kernel schedules a guest that may use slack",
    )
    run.add_argument(
        "--max-host-busy",
        type=float,
        default=MaxHostBusy().share,
        metavar="SHARE",
        help="busy share of a host from which on its guest is held (default %(default)s; 1: never)",
    )
    for side in ("host", "guest"):
        run.add_argument(
            f"--{side}",
            type=EngineKind,
            choices=list(EngineKind),
            default=EngineKind.VLLM,
            help=f"engine of the {side}: vllm (the default) or sglang",
        )
    run.add_argument(
        "--tensor-parallel-size",
        dest="tensor_parallel",
        type=int,
        choices=(1, 2),
        default=1,
        help="ranks of each engine, which share two cores (default %(default)s)",
    )
    run.add_argument("--busy-targets", type=float, nargs="+", default=BUSY_TARGETS, metavar="SHARE")
    run.add_argument("--only-traffic", choices=("poisson", "bursty", "trace"))
    run.add_argument("--ttft-target-s", type=float, help="default: from what the host does alone")
    run.add_argument("--tpot-target-s", type=float)
    for name, what in (
        ("report", "write result and plots anew from the raw records"),
        ("verify", "recompute every figure from the raw records and compare"),
    ):
        commands.add_parser(name, help=what).add_argument("out", type=Path, metavar="DIR")
    return parser


def _run(args: argparse.Namespace) -> int:
    # Verifying needs no engine, so the run's modules are imported here.
    from bench.coserve.run import run_bench

    fixed = ("command", "quick", "out")
    options = {name: value for name, value in vars(args).items() if name not in fixed}
    make = quick_settings if args.quick else BenchSettings
    run_bench(make(args.out, **options))
    return _report(args)


def _report(args: argparse.Namespace) -> int:
    from bench.coserve.result import draw_all

    result = write_result(args.out)
    draw_all(result, args.out)
    sys.stdout.write(render(result))
    return int(result["verdict"] == "FAILS")


def _verify(args: argparse.Namespace) -> int:
    differences = verify(args.out)
    for difference in differences:
        sys.stdout.write(f"{difference}\n")
    differ = f"{len(differences)} figures differ from the raw records"
    found = differ if differences else "every figure follows from the raw records"
    sys.stdout.write(f"{args.out}: {found}\n")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())

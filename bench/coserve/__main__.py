"""`python -m bench.coserve run|report|verify`.

Exit code 0 when done, 1 when a limit fails or a figure differs, 2 for bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.coserve.plan import BenchSettings, quick_settings
from bench.coserve.result import render, verify, write_result
from rose.engines import EngineKind
from rose.errors import RoseError

DEFAULT_OUT = Path("out/bench/coserve")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.command == "verify":
            return _verify(args.folder)
        if args.command == "report":
            return _report(args.folder)
        return _run(args)
    except RoseError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.coserve", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write result and plots")
    run.add_argument("--quick", action="store_true", help="the same rows in a quarter of an hour")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--trace", type=Path, metavar="FILE", help="bursts of this Azure trace (CSV)")
    run.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR")
    run.add_argument("--port-base", type=int, default=BenchSettings(DEFAULT_OUT).port_base)
    run.add_argument(
        "--lent-priority",
        choices=("background", "normal"),
        default="background",
        help="how the kernel schedules a guest that may use slack",
    )
    run.add_argument(
        "--max-host-busy",
        type=float,
        default=BenchSettings(DEFAULT_OUT).max_host_busy,
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
        "--sglang-python",
        type=Path,
        default=BenchSettings(DEFAULT_OUT).sglang_python,
        metavar="FILE",
        help="interpreter that has SGLang (default %(default)s)",
    )
    run.add_argument("--ttft-target-s", type=float, help="default: from what the host does alone")
    run.add_argument("--tpot-target-s", type=float)
    for name, what in (
        ("report", "write result and plots anew from the raw records"),
        ("verify", "recompute every figure from the raw records and compare"),
    ):
        commands.add_parser(name, help=what).add_argument("folder", type=Path, metavar="DIR")
    return parser


def _run(args: argparse.Namespace) -> int:
    # Verifying needs no engine, so the run's modules are imported here.
    from bench.coserve.run import run_bench

    fixed = ("command", "quick", "out")
    options = {name: value for name, value in vars(args).items() if name not in fixed}
    make = quick_settings if args.quick else BenchSettings
    run_bench(make(args.out, **options))
    return _report(args.out)


def _report(folder: Path) -> int:
    from bench.coserve.result import draw_all

    result = write_result(folder)
    draw_all(result, folder)
    sys.stdout.write(render(result))
    return int(result["verdict"] == "FAILS")


def _verify(folder: Path) -> int:
    differences = verify(folder)
    for difference in differences:
        sys.stdout.write(f"{difference}\n")
    sys.stdout.write(
        f"{folder}: {len(differences)} figures differ from the raw records\n"
        if differences
        else f"{folder}: every figure follows from the raw records\n"
    )
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())

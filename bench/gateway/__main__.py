"""`python -m bench.gateway`: what routers add to turns and tokens, beside the bare engine.

Writes gateway.json and gateway.txt. Exit code 0, 1 when a limit fails, 2 for bad input.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.checks import FAILS, row_verdict
from bench.common.processes import cores
from bench.common.report import add_out_folder, machine, parser_of, put_both, reported, say
from bench.common.tiny_models import FLEET_MODEL
from bench.gateway.real import Scale, made_up_sessions, over_real_engines, read_sessions
from bench.gateway.report import checks, rows, table
from bench.gateway.rounds import StandInBench, peers
from bench.load.streams import STREAMS
from rose.errors import ConfigError

PROG = "bench.gateway"
QUICK_STREAMS = (1, 100, 2000)
progress = partial(say, "gateway")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return reported(PROG, lambda: measured(args))


def measured(args: argparse.Namespace) -> int:
    """Measure all cells and return the exit code."""
    commands, missing = peers(args.peer)
    streams = args.streams or (QUICK_STREAMS if args.quick else STREAMS)
    if min(streams) < 1 or args.rounds < 1 or args.seconds <= 0:
        raise ConfigError("--streams, --rounds and --seconds: above 0")
    if args.sessions is not None and not args.real:
        raise ConfigError("--sessions are replayed on real engines: add --real")
    args.out.mkdir(parents=True, exist_ok=True)
    rounds = 1 if args.quick else args.rounds
    with StandInBench(args.out, commands, max(streams), progress) as bench:
        cells = bench.rounds(streams, rounds, args.seconds)
        skipped = {**dict.fromkeys(missing, "not installed: see --peer"), **bench.skipped}
    sessions: list[dict[str, Any]] = []
    if args.real:
        scale, folder = Scale(), args.out / "gateway-real"
        replayed = {"made up": made_up_sessions(scale)}
        if args.sessions is not None:
            replayed["recorded"] = read_sessions(args.sessions, scale)
        FLEET_MODEL.save(folder / "model")
        real, sessions = asyncio.run(
            over_real_engines(folder, replayed, rounds, args.seconds, progress)
        )
        cells += real
    made = rows(cells)
    judged = checks(made, sessions)
    result = {
        "machine": {**machine(), "placement": cores()},
        "rows": made,
        "sessions": sessions,
        "skipped": skipped,
        "checks": judged,
        "cells": cells,
    }
    put_both(args.out, "gateway", result, table(result))
    return int(row_verdict(judged) == FAILS)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, PROG)
    add_out_folder(parser)
    parser.add_argument("--streams", type=int, nargs="+", metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="measured, of each cell")
    parser.add_argument("--quick", action="store_true", help="one round, three numbers of streams")
    parser.add_argument("--real", action="store_true", help="over real vLLM too: two minutes more")
    parser.add_argument(
        "--sessions", type=Path, metavar="FILE", help="recorded sessions to replay on real vLLM"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another router; {port} and {urls} in its command are filled in",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.gateway`: what routers add to turns and tokens, beside the bare engine.

Writes gateway.json and gateway.txt. Exit code 0, 1 when a limit fails, 2 for bad input.
"""

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.tiny_models import FLEET_MODEL
from bench.gateway.arms import peers
from bench.gateway.generator import STREAMS
from bench.gateway.processes import cores
from bench.gateway.real import Scale, made_up_sessions, over_real_engines, read_sessions
from bench.gateway.report import checks, rows, table
from bench.gateway.run import StandInBench, write
from rose.errors import ConfigError, RoseError

QUICK_STREAMS = (1, 100, 2000)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = _parser().parse_args(argv)
        args.out.mkdir(parents=True, exist_ok=True)
        result = measure(args)
    except RoseError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    text = table(result)
    write(args.out, result, text)
    sys.stdout.write(text)
    return int(any(check["verdict"] == "FAILS" for check in result["checks"]))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for."""
    commands, missing = peers(args.peer)
    streams = args.streams or (QUICK_STREAMS if args.quick else STREAMS)
    if min(streams) < 1 or args.rounds < 1 or args.seconds <= 0:
        raise ConfigError("--streams, --rounds and --seconds: above 0")
    if args.sessions is not None and not args.real:
        raise ConfigError("--sessions are replayed on real engines: add --real")
    places = cores()
    with StandInBench(args.out, commands, places, max(streams), _say) as bench:
        cells = bench.rounds(streams, 1 if args.quick else args.rounds, args.seconds)
        skipped = {**dict.fromkeys(missing, "not installed: see --peer"), **bench.skipped}
    sessions: list[dict[str, Any]] = []
    if args.real:
        real, sessions = asyncio.run(_over_real(args, places))
        cells += real
    made = rows(cells)
    return {
        "machine": {"cpus": os.cpu_count(), "cpu": platform.processor(), "placement": places},
        "rows": made,
        "sessions": sessions,
        "skipped": skipped,
        "checks": checks(made, sessions),
        "cells": cells,
    }


async def _over_real(
    args: argparse.Namespace, places: dict[str, list[int]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    scale, folder = Scale(), args.out / "gateway-real"
    sessions = {"made up": made_up_sessions(scale)}
    if args.sessions is not None:
        sessions["recorded"] = read_sessions(args.sessions, scale)
    await asyncio.to_thread(FLEET_MODEL.save, folder / "model")
    rounds = 1 if args.quick else args.rounds
    return await over_real_engines(folder, sessions, rounds, args.seconds, places, _say)


def _say(what: str) -> None:
    sys.stderr.write(f"bench: {what}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gateway", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR")
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

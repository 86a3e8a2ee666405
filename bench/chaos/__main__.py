"""`python -m bench.chaos`: turns on real engines that are killed, frozen and revoked.

Writes chaos.json. Exit code 0, 1 when a turn was lost, doubled or wrong, 2 for bad input.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from bench.chaos.fleet import ChaosFleet
from bench.chaos.run import chaos
from bench.common.report import add_out_folder, parser_of, put, reported
from bench.common.tiny_models import FLEET_MODEL

PROG = "bench.chaos"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults, print the findings, keep them."""
    parser = parser_of(__doc__, PROG)
    add_out_folder(parser)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--in-flight", type=int, default=200, metavar="N")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    return reported(PROG, lambda: asyncio.run(_run(args)))


async def _run(args: argparse.Namespace) -> int:
    folder = args.out / "chaos"
    folder.mkdir(parents=True, exist_ok=True)
    FLEET_MODEL.save(folder / "model")
    async with ChaosFleet(folder, folder / "model", args.replicas) as fleet:
        found = await chaos(fleet, args.seconds, args.in_flight, args.seed)
    put(found, args.out / "chaos.json", shown=False)
    for name, value in found.items():
        sys.stdout.write(f"{name:>24}  {value}\n")
    return int(bool(found["faults_found"]))


if __name__ == "__main__":
    sys.exit(main())

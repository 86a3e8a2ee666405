"""`python -m bench.chaos`: turns on real engines that are killed, frozen and revoked.

Writes chaos.json. Exit code 0, 1 when a turn was lost, doubled or wrong, 2 for bad input.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.chaos.run import start_and_run
from bench.common.tiny_models import FLEET_MODEL
from rose.errors import RoseError


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    folder = args.out / "chaos"
    folder.mkdir(parents=True, exist_ok=True)
    FLEET_MODEL.save(folder / "model")
    try:
        found = asyncio.run(
            start_and_run(folder, args.seconds, args.in_flight, args.seed, args.replicas)
        )
    except RoseError as error:
        sys.stderr.write(f"chaos: {error}\n")
        return 2
    (args.out / "chaos.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, value in found.items():
        sys.stdout.write(f"{name:>24}  {value}\n")
    return int(bool(found["faults_found"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.chaos", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--in-flight", type=int, default=200, metavar="N")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`python -m rose.bench.gpu.measure PIECE --sizes JSON --place cuda --out FILE`: one piece's work.

A process of its own, so that a fault of the card ends this piece alone and all its memory goes
back. Writes {"measured"} or {"failed": one line} to FILE.
"""

import argparse
import importlib
import json
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose.bench.gpu.piece import Piece
from rose.bench.gpu.registry import pieces_of
from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.work.cuda import insist_device
from rose.errors import RoseError

GRACE_S = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 1 when the piece could not be measured."""
    args = _parser().parse_args(argv)
    sizes = Sizes(**json.loads(args.sizes))
    (piece,) = pieces_of((args.piece,))
    # A runner that was killed cannot end this process, and the card is not ours for longer.
    signal.alarm(int(piece.limit_s) + GRACE_S)
    try:
        answer: dict[str, Any] = {"measured": work_of(piece)(sizes, args.place)}
    except Exception as error:  # noqa: BLE001 -- whatever it is, the runner is told in one line
        traceback.print_exc()
        answer = {"failed": reason(error)}
    args.out.write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")
    return int("failed" in answer)


def work_of(piece: Piece) -> Any:  # noqa: ANN401 -- a function of (Sizes, place)
    """What measures it."""
    module, _, function = piece.work.partition(":")

    def work(sizes: Sizes, place: str) -> dict[str, Any]:
        if "torch" in piece.modules:
            insist_device(place)
        found: dict[str, Any] = getattr(importlib.import_module(module), function)(sizes, place)
        return found

    return work


def reason(error: BaseException) -> str:
    """One line of what went wrong."""
    first = (str(error).splitlines() or ["no message"])[0]
    if isinstance(error, RoseError):
        return first
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in first.lower():
        return f"the card ran out of memory ({first}); lower --gib, or free the card"
    return f"{type(error).__name__}: {first}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rose.bench.gpu.measure", description=__doc__)
    parser.add_argument("piece")
    parser.add_argument("--sizes", default="{}", metavar="JSON")
    parser.add_argument("--place", default="cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())

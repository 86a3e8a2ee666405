"""`python -m bench.gpu.measure PIECE… --sizes JSON --place cuda --out DIR`: the pieces' work.

A process of its own, so that a fault of the card ends this piece alone and all its memory goes
back; pieces of a group share one. Writes {"measured"} or {"failed": one line} to DIR/PIECE.json as
each is done; after one that failed it ends.
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

from bench.gpu.pieces import MOST_S, GpuPiece, Measured, pieces_of
from bench.gpu.sizes import Sizes
from bench.gpu.work.timing import insist_device
from rose.errors import RoseError

GRACE_S = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pieces; exit code 1 when one could not be measured."""
    args = _parser().parse_args(argv)
    pieces = pieces_of(tuple(args.pieces))
    # A runner that was killed cannot end this process, and the card is not ours for longer.
    signal.alarm(int(args.seconds) + GRACE_S)
    waiting = [piece.name for piece in pieces]

    def answer(piece: GpuPiece, measured: Measured) -> None:
        waiting.remove(piece.name)
        _write(args.out, piece.name, {"measured": measured})

    try:
        _measure(pieces, args, answer)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the runner is told in one line
        traceback.print_exc()
        _write(args.out, waiting[0], {"failed": reason(error)})
        return 1
    return 0


def _measure(pieces: tuple[GpuPiece, ...], args: argparse.Namespace, answer: Any) -> None:  # noqa: ANN401
    sizes = Sizes.of(json.loads(args.sizes))
    first = pieces[0]
    if "torch" in first.modules:
        insist_device(args.place)
    if first.group:
        measure_all = function_of(first.group)
        measure_all(pieces, sizes, args.place, args.seconds, (args.logs, args.kept), answer)
        return
    answer(first, function_of(first.work)(sizes, args.place))


def function_of(name: str) -> Any:  # noqa: ANN401 -- as the piece says
    """What `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def reason(error: BaseException) -> str:
    """One line of what went wrong."""
    first = (str(error).splitlines() or ["no message"])[0]
    if isinstance(error, RoseError):
        return first
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in first.lower():
        return f"the card ran out of memory ({first}); lower --gib, or free the card"
    return f"{type(error).__name__}: {first}"


def _write(folder: Path, piece: str, answer: dict[str, Any]) -> None:
    beside = folder / f"{piece}.tmp"
    beside.write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")
    beside.replace(folder / f"{piece}.json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu.measure", description=__doc__)
    parser.add_argument("pieces", nargs="+", metavar="PIECE")
    parser.add_argument("--sizes", required=True, metavar="JSON")
    parser.add_argument("--place", default="cuda")
    parser.add_argument("--seconds", type=float, default=MOST_S, help="for all pieces")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--logs", type=Path, default=Path("out/gpu"), metavar="DIR")
    parser.add_argument("--kept", type=Path, default=Path("out/gpu"), metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())

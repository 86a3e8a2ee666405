"""`python -m bench.gpu.measure PIECE… --sizes JSON --place cuda --out DIR`: the pieces' work.

A process of its own, so that a fault of the card ends this piece alone and all its memory goes
back. Writes {"measured"} or {"failed": one line} to DIR/PIECE.json as each piece is done; after a
piece that failed the process ends.

Served pieces share the engines of one process, since starting three engines takes minutes:

    start ── piece ── piece ── … ── end
             the time left, in equal parts over the pieces that still have their least time;
             the other pieces are left for another process
"""

import argparse
import asyncio
import importlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.pieces import MOST_S, GpuPiece, Measured, PieceError, pieces_of
from bench.gpu.sizes import Sizes
from bench.gpu.work.timing import insist_device
from rose.engines import Device
from rose.errors import RoseError

GRACE_S = 30
# Three engines have to end, and the last answer is written, within this time.
END_S = 15.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pieces; exit code 1 when one could not be measured."""
    args = _parser().parse_args(argv)
    pieces = pieces_of(tuple(args.pieces))
    # A runner that was killed cannot end this process, and the card is not ours for longer.
    signal.alarm(int(args.seconds) + GRACE_S)
    work = Work(pieces, Sizes.of(json.loads(args.sizes)), args)
    try:
        work.run()
    except Exception as error:  # noqa: BLE001 -- the runner gets every error in one line
        traceback.print_exc()
        _write(args.out, work.waiting[0].name, {"failed": reason(error)})
        return 1
    return 0


class Work:
    """The pieces of this process; `waiting` are those without an answer."""

    def __init__(self, pieces: Sequence[GpuPiece], sizes: Sizes, args: argparse.Namespace) -> None:
        self.waiting = list(pieces)
        self._sizes = sizes
        self._args = args

    def run(self) -> None:
        """Measure at least the first piece. Raises RoseError in one line when a piece failed."""
        first = self.waiting[0]
        if "torch" in first.modules:
            insist_device(self._args.place)
        if first.served:
            asyncio.run(self._serve())
        else:
            self._answer(function_of(first.work)(self._sizes, self._args.place))

    async def _serve(self) -> None:
        from bench.gpu.serve.session import opened_session

        until_s = time.monotonic() + self._args.seconds - END_S
        folder = self._args.logs / f"engines-{os.getpid()}"
        folder.mkdir(parents=True)
        known_weights = any(piece.known_weights for piece in self.waiting)
        async with opened_session(
            self._sizes.serving, Device(self._args.place), folder, self._args.kept, until_s,
            known_weights=known_weights,
        ) as session:  # fmt: skip
            first, least_s = self.waiting[0], self.waiting[0].least_s(self._sizes)
            if session.left_s < least_s:
                raise PieceError(
                    f"the engines took {session.start_s:.0f} s to start and {session.left_s:.0f} s"
                    f" are left, of which {first.name} needs {least_s:.0f}: give a larger"
                    " --budget-s or a shorter --arm-s"
                )
            for piece, share_s in self._shares(session):
                try:
                    async with asyncio.timeout(session.left_s):
                        self._answer(await function_of(piece.work)(session, share_s))
                except TimeoutError as error:
                    raise PieceError(
                        f"not done in what was left of its process; see {folder}"
                    ) from error

    def _shares(self, session: Any) -> Iterator[tuple[GpuPiece, float]]:  # noqa: ANN401
        """Yield each piece that has its least time, and its share of what is left."""
        while self.waiting:
            least = itertools.accumulate(piece.least_s(self._sizes) for piece in self.waiting)
            fitting = sum(end_s <= session.left_s for end_s in least)
            if not fitting:
                return
            yield self.waiting[0], session.left_s / fitting

    def _answer(self, measured: Measured) -> None:
        _write(self._args.out, self.waiting.pop(0).name, {"measured": measured})


def function_of(name: str) -> Any:  # noqa: ANN401 -- as the piece says
    """Return the function that `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def reason(error: BaseException) -> str:
    """Return the error as one line."""
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

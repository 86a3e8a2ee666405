"""`python -m bench.gpu.measure JSON`: the work of the pieces in an order, in a process of its own.

A fault of the card so ends this piece alone, and all its memory goes back. The process writes
{"measured"} or {"failed": one line} to PIECE.json as each piece is done; after a piece that failed
it ends. Served pieces share the engines of one process, since starting three engines takes minutes:

    start ── piece ── piece ── … ── end
             the time left, in equal parts over the pieces that still have their least time;
             the other pieces are left for another process
"""

import asyncio
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.gpu.machine import MARK, ROOT
from bench.gpu.pieces import GpuPiece, Measured, PieceError, Sizes, pieces_of
from rose.engines import Device
from rose.errors import RoseError
from rose.nvml import Card

# The process ends its engines within its own time; this is granted beyond it.
GRACE_S = 5.0
POLL_S = 0.1
# A runner that was killed cannot end the process, which ends by itself so much later.
ALARM_S = 30
# Three engines have to end, and the last answer is written, within this time.
END_S = 15.0


@dataclass(frozen=True, slots=True)
class PieceOrder:
    """Order to a process. seconds: for all pieces. logs, kept: folders of logs, and of results."""

    pieces: tuple[GpuPiece, ...]
    sizes: Sizes
    card: Card
    seconds: float
    logs: Path
    kept: Path

    @property
    def log(self) -> Path:
        """File of the process's output."""
        return self.logs / f"{self.pieces[0].name}.log"


@dataclass(frozen=True, slots=True)
class Answered:
    """One piece is done: `measured`, or else `failed` says why not."""

    piece: GpuPiece
    measured: Measured | None = None
    failed: str = ""


Measure = Callable[[PieceOrder], Iterator[Answered]]


def measure_apart(
    order: PieceOrder, module: str = "bench.gpu.measure", place: str = "cuda"
) -> Iterator[Answered]:
    """Measure in another process; yield each answer as soon as it is known.

    The last answer may be that the process ended, or was ended, in the middle of a piece. Pieces
    without an answer were not begun.
    """
    order.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rose-gpu-") as scratch:
        told = {
            "pieces": [piece.name for piece in order.pieces],
            "sizes": asdict(order.sizes),
            "seconds": order.seconds,
            "place": place,
            "out": scratch,
            "logs": str(order.logs.absolute()),
            "kept": str(order.kept.absolute()),
        }
        command = [sys.executable, "-m", module, json.dumps(told)]
        with (
            order.log.open("wb") as log,
            subprocess.Popen(  # noqa: S603 -- our own
                command, env=environment_of(order.card), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, process_group=0, cwd=ROOT,
            ) as process,
        ):  # fmt: skip
            try:
                yield from _answers(process, order, Path(scratch))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _answers(
    process: subprocess.Popen[bytes], order: PieceOrder, folder: Path
) -> Iterator[Answered]:
    waiting = list(order.pieces)
    deadline_s = time.monotonic() + order.seconds + GRACE_S
    while True:
        # Poll first: a file that the process wrote before its end exists by then.
        status, late = process.poll(), time.monotonic() >= deadline_s
        while waiting and (answer := folder / f"{waiting[0].name}.json").is_file():
            found = Answered(waiting.pop(0), **json.loads(answer.read_text(encoding="utf-8")))
            yield found
            if found.failed:
                waiting = []
        if status is not None or late:
            # A process without time for its next piece ends well, once it has measured one.
            unanswered = status is None or status or len(waiting) == len(order.pieces)
            if waiting and unanswered:
                yield Answered(waiting[0], failed=f"{_why(status, order)}; see {order.log}")
            return
        time.sleep(POLL_S)


def _why(status: int | None, order: PieceOrder) -> str:
    if status is None:
        return f"took longer than its {order.seconds:.0f} s and was ended"
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else ""
    return f"its process {how or f'ended with status {status}'} without an answer"


def environment_of(card: Card) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Nothing is downloaded: models are made here.
    return {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": card.uuid,
        "HF_HUB_OFFLINE": "1",
        MARK: str(os.getpid()),
    }


class PieceWork:
    """The pieces of this process; `waiting` are those without an answer."""

    def __init__(self, pieces: Sequence[GpuPiece], sizes: Sizes, args: SimpleNamespace) -> None:
        self.waiting = list(pieces)
        self._sizes = sizes
        self._args = args

    def run(self) -> None:
        """Measure at least the first piece. Raises RoseError in one line when a piece failed."""
        first = self.waiting[0]
        if "torch" in first.modules:
            from bench.gpu.kernels import insist_device

            insist_device(self._args.place)
        if first.served:
            asyncio.run(self._serve())
        else:
            self._answer(function_of(first.work)(self._sizes, self._args.place))

    async def _serve(self) -> None:
        from bench.gpu.serving import opened_session

        until_s = time.monotonic() + self._args.seconds - END_S
        folder = self._args.logs / f"engines-{os.getpid()}"
        folder.mkdir(parents=True)
        async with opened_session(
            self._sizes.serving, Device(self._args.place), folder, self._args.kept, until_s,
            known_weights=any(piece.known_weights for piece in self.waiting),
        ) as session:  # fmt: skip
            first, least_s = self.waiting[0], self.waiting[0].least_s(self._sizes)
            if session.left_s < least_s:
                raise PieceError(
                    f"the engines took {session.start_s:.0f} s to start and {session.left_s:.0f} s"
                    f" are left, of which {first.name} needs {least_s:.0f}: give a larger"
                    " --budget-s or a shorter --arm-s"
                )
            while self.waiting:
                least = itertools.accumulate(piece.least_s(self._sizes) for piece in self.waiting)
                fitting = sum(end_s <= session.left_s for end_s in least)
                if not fitting:
                    return
                work = function_of(self.waiting[0].work)
                try:
                    async with asyncio.timeout(session.left_s):
                        self._answer(await work(session, session.left_s / fitting))
                except TimeoutError as error:
                    raise PieceError(
                        f"not done in what was left of its process; see {folder}"
                    ) from error

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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pieces; exit code 1 when one could not be measured."""
    args = SimpleNamespace(**json.loads((argv or sys.argv[1:])[0]))
    args.out, args.logs, args.kept = Path(args.out), Path(args.logs), Path(args.kept)
    signal.alarm(int(args.seconds) + ALARM_S)
    work = PieceWork(pieces_of(tuple(args.pieces)), Sizes.of(args.sizes), args)
    try:
        work.run()
    except Exception as error:  # noqa: BLE001 -- the runner gets every error in one line
        traceback.print_exc()
        _write(args.out, work.waiting[0].name, {"failed": reason(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

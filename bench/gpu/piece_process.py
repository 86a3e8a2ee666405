"""Process of one piece or of several: started, limited in time, ended with its children.

It writes `<piece>.json` for each piece that it is done with: {"measured"} or {"failed": one line}.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.pieces import GpuPiece, Measured
from bench.gpu.sizes import Sizes
from rose.nvml import Card

MEASURES = "bench.gpu.measure"
ROOT = Path(__file__).resolve().parents[2]
# The process ends its engines within its own time; this is granted beyond it.
GRACE_S = 5.0
POLL_S = 0.1
MARK = "ROSE_GPU_PIECES"
"""In the environment of everything that a piece starts: the id of the process that runs pieces."""


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
    order: PieceOrder, module: str = MEASURES, place: str = "cuda"
) -> Iterator[Answered]:
    """Measure in another process; yield each answer as soon as it is known.

    The last answer may be that the process ended, or was ended, in the middle of a piece. Pieces
    without an answer were not begun. `module`: see `measure`, whose arguments it takes.
    """
    order.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rose-gpu-") as scratch:
        answers = Path(scratch)
        command = [
            sys.executable, "-m", module, *(piece.name for piece in order.pieces),
            "--sizes", json.dumps(asdict(order.sizes)), "--out", str(answers), "--place", place,
            "--seconds", str(order.seconds), "--logs", str(order.logs.absolute()),
            "--kept", str(order.kept.absolute()),
        ]  # fmt: skip
        waiting = list(order.pieces)
        with (
            order.log.open("wb") as log,
            subprocess.Popen(  # noqa: S603 -- our own
                command, env=_environment(order.card), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, process_group=0, cwd=ROOT,
            ) as process,
        ):  # fmt: skip
            try:
                yield from _answers(process, order, answers, waiting)
            finally:
                _end_group(process.pid)


def _answers(
    process: subprocess.Popen[bytes], order: PieceOrder, answers: Path, waiting: list[GpuPiece]
) -> Iterator[Answered]:
    deadline_s = time.monotonic() + order.seconds + GRACE_S
    failed, answered = False, 0
    while True:
        # Poll first: a file that the process wrote before its end exists by then.
        status = process.poll()
        while waiting and (answer := _read(answers, waiting[0])) is not None:
            waiting.pop(0)
            answered += 1
            failed = failed or bool(answer.failed)
            yield answer
        if status is not None:
            if waiting and not failed and (status or not answered):
                said = f"its process {_ended(status)} without an answer; see {order.log}"
                yield Answered(waiting.pop(0), failed=said)
            return
        if time.monotonic() >= deadline_s:
            if waiting and not failed:
                said = f"took longer than its {order.seconds:.0f} s and was ended; see {order.log}"
                yield Answered(waiting.pop(0), failed=said)
            return
        time.sleep(POLL_S)


def _read(answers: Path, piece: GpuPiece) -> Answered | None:
    try:
        said = json.loads((answers / f"{piece.name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if "failed" in said:
        return Answered(piece, failed=str(said["failed"]))
    return Answered(piece, measured=said["measured"])


def _environment(card: Card) -> dict[str, str]:
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


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"

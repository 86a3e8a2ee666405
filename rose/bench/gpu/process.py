"""A piece's process: started, given its time, and ended with all that it started."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.piece import Measured, Piece
from rose.bench.gpu.sizes import Sizes
from rose.nvml import Card

MEASURES = "rose.bench.gpu.measure"
ROOT = Path(__file__).resolve().parents[3]


def measure_apart(
    piece: Piece, sizes: Sizes, card: Card, log: Path, module: str = MEASURES
) -> Measured:
    """Measure in another process. Raises PieceError with why it could not.

    `log` gets what the process prints. `module`: see `measure`, whose arguments it takes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rose-gpu-") as scratch:
        answer = Path(scratch) / "answer.json"
        command = [
            sys.executable, "-m", module, piece.name,
            "--sizes", json.dumps(asdict(sizes)), "--out", str(answer),
        ]  # fmt: skip
        status = _run(command, _environment(card), log, piece.limit_s)
        if status is None:
            raise PieceError(f"took longer than its {piece.limit_s:.0f} s and was ended; see {log}")
        if not answer.is_file():
            raise PieceError(f"its process {_ended(status)} without an answer; see {log}")
        said = json.loads(answer.read_text(encoding="utf-8"))
    if "failed" in said:
        raise PieceError(str(said["failed"]))
    measured: Measured = said["measured"]
    return measured


def _environment(card: Card) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Nothing is fetched: what is measured needs no model of anybody's.
    return {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": card.uuid,
        "HF_HUB_OFFLINE": "1",
    }


def _run(command: list[str], environment: dict[str, str], log: Path, limit_s: float) -> int | None:
    """Exit status, None when its time was over. Nothing that it started is left."""
    with (
        log.open("wb") as file,
        subprocess.Popen(  # noqa: S603 -- our own
            command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            process_group=0, cwd=ROOT,
        ) as process,
    ):  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process.pid)


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"

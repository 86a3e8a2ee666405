"""How much memory coding a chunk takes beyond the weights themselves: the process's own peak."""

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from rose.bench.weights.synthetic import Step, adam_step
from weight_transfer.format.chunk import decode_chunk, encode_chunk, overwrite_chunk
from weight_transfer.format.codec import Level
from weight_transfer.format.tensors import TensorBits

ROWS, COLUMNS = 8192, 4096
_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peaks(rate: float, seed: int) -> list[dict[str, object]]:
    """Rows of peak memory over a chunk's dense bytes; at this density and with all anew."""
    step = adam_step(ROWS, COLUMNS, rate, seed)
    return [row for case in (step, _anew(step, seed)) for row in _of(case)]


def _anew(step: Step, seed: int) -> Step:
    bits = np.random.default_rng(seed).integers(0, 1 << 16, step.old.bits.size, dtype="<u2")
    return Step(step.old, TensorBits("w", "bfloat16", step.old.shape, bits))


def _of(step: Step) -> list[dict[str, object]]:
    size = step.old.bits.nbytes
    copy = TensorBits("w", "bfloat16", step.old.shape, step.old.bits.copy())
    rows: list[dict[str, object]] = []
    for level in Level:
        encode = partial(encode_chunk, step.old, step.new, (0, step.old.rows), 0, level)
        encoded = encode().encoded  # Compiles, too.
        decode = partial(decode_chunk, encoded, step.old, 0)
        overwrite = partial(overwrite_chunk, encoded, copy, 0)
        decode()
        row: dict[str, object] = {"density": step.density, "level": level.value}
        for name, work in (("encode", encode), ("decode", decode), ("overwrite", overwrite)):
            copy.bits[:] = step.old.bits
            row[f"{name}_chunks"] = _peak_bytes(work) / size
        rows.append(row)
    return rows


def _peak_bytes(work: Callable[[], object]) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5")  # The peak is the present from here on.
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    line = next(one for one in _STATUS.read_text().splitlines() if one.startswith(f"{name}:"))
    return int(line.split()[1]) << 10

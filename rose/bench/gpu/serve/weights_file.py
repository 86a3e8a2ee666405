"""Random weights of a model on disk, once: what a guest's version 0 is, which its engine proves."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rose.bench.gpu.models import ModelShape

FILE = "model.safetensors"
THREADS = 8
_ONE = 0x3F80
# Of bf16: sign and mantissa are drawn whole, and two bits of an exponent from 2^-8 on.
_SIGN_AND_MANTISSA, _EXPONENT, _DRAWN_SHIFT, _SMALLEST = 0x807F, 7, 7, 119


def write_weights(shape: ModelShape, folder: Path, seed: int) -> Path:
    """A safetensors file of `seed`'s weights; one that is there whole is kept."""
    path = folder / f"{seed}-{FILE}"
    header, offsets = _header(shape)
    size = len(header) + 2 * shape.weights
    if path.is_file() and path.stat().st_size == size:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file, ThreadPoolExecutor(THREADS) as pool:
        os.pwrite(file.fileno(), header, 0)

        def fill(numbered: tuple[int, tuple[str, int]]) -> None:
            number, (name, offset) = numbered
            bits = _weights(name, prod(shape.tensors()[name]), seed, number)
            written = memoryview(bits.tobytes())
            at = len(header) + offset
            while written:
                done = os.pwrite(file.fileno(), written, at)
                written, at = written[done:], at + done

        list(pool.map(fill, enumerate(offsets.items())))
    part.rename(path)
    return path


def checkpoint_name(name: str) -> str:
    """A tensor's name in a checkpoint."""
    return name if name.endswith(".bias") else f"{name}.weight"


def _header(shape: ModelShape) -> tuple[bytes, dict[str, int]]:
    """The file's head, and where each tensor begins behind it."""
    offsets: dict[str, int] = {}
    entries: dict[str, object] = {}
    end = 0
    for name, dimensions in shape.tensors().items():
        offsets[name], end = end, end + 2 * prod(dimensions)
        entries[checkpoint_name(name)] = {
            "dtype": "BF16",
            "shape": list(dimensions),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _weights(name: str, count: int, seed: int, number: int) -> NDArray[np.uint16]:
    """Norms are one; others are spread over two signs, four exponents and all mantissas."""
    if "norm" in name:
        return np.full(count, _ONE, np.uint16)
    drawn = np.random.default_rng((seed, number)).integers(0, 1 << 16, count, np.uint16)
    bits = drawn & np.uint16(_SIGN_AND_MANTISSA)
    bits |= ((((drawn >> _DRAWN_SHIFT) & 3) + _SMALLEST) << _EXPONENT).astype(np.uint16)
    return bits

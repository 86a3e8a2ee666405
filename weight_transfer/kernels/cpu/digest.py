"""Kernels of the tensor digest of `weight_transfer.format.digest`, on the CPU.

They sum whole ranges, single weights and rectangles whose rows lie `stride` weights apart, and they
overwrite weights while they sum the change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.cpu.simd import AHEAD, compiled, prefetch

Bits = NDArray[np.unsignedinteger[Any]]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)


@compiled
def mix(index: np.uint64, value: np.uint64) -> np.uint64:
    """Return what one weight adds to the sum."""
    mixed = (index + np.uint64(1)) * _GAMMA + value
    mixed = (mixed ^ (mixed >> _S1)) * _M1
    mixed = (mixed ^ (mixed >> _S2)) * _M2
    return mixed ^ (mixed >> _S3)


@compiled
def sum_all(bits: Bits, first: int) -> np.uint64:
    """Sum over a flat range whose first weight has index `first`."""
    total = np.uint64(0)
    for k in range(bits.size):
        total += mix(np.uint64(first + k), np.uint64(bits[k]))
    return total


@compiled
def sum_difference(indices: NDArray[np.int64], old: Bits, new: Bits) -> np.uint64:
    """Return the increase of the sum when the weights at `indices` go from `old` to `new`."""
    total = np.uint64(0)
    for k in range(indices.size):
        index = np.uint64(indices[k])
        total += mix(index, np.uint64(new[k])) - mix(index, np.uint64(old[k]))
    return total


@compiled
def sum_pending(old: Bits, indices: NDArray[np.int64], values: Bits) -> np.uint64:
    """Return the increase of the sum when `values` are written to `old` at `indices`."""
    total = np.uint64(0)
    for k in range(indices.size):
        prefetch(old, indices[min(k + AHEAD, indices.size - 1)])
        at = indices[k]
        index = np.uint64(at)
        total += mix(index, np.uint64(values[k])) - mix(index, np.uint64(old[at]))
    return total


@compiled
def scatter(target: Bits, indices: NDArray[np.int64], values: Bits) -> None:
    """Overwrite `target` at `indices`."""
    for k in range(indices.size):
        prefetch(target, indices[min(k + AHEAD, indices.size - 1)])
        target[indices[k]] = values[k]


@compiled
def scatter_and_sum(target: Bits, indices: NDArray[np.int64], values: Bits) -> np.uint64:
    """Overwrite `target` at `indices`; returns what its sum grew by."""
    total = np.uint64(0)
    for k in range(indices.size):
        prefetch(target, indices[min(k + AHEAD, indices.size - 1)])
        at = indices[k]
        index = np.uint64(at)
        total += mix(index, np.uint64(values[k])) - mix(index, np.uint64(target[at]))
        target[at] = values[k]
    return total


@compiled
def sum_block(bits: Bits, first: int, columns: int, stride: int) -> np.uint64:
    """Sum over rows of `columns` weights each, the first of which has index `first`."""
    total = np.uint64(0)
    for row in range(bits.size // columns):
        total += sum_all(bits[row * columns : (row + 1) * columns], first + row * stride)
    return total

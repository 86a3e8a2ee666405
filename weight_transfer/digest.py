"""Per-tensor digest: a position-mixed 64-bit sum, updatable in O(changed).

digest(t) = Σ_i mix(i, bits[i]) mod 2^64, with mix(i, v) = finalise((i + 1)·γ + v) and SplitMix64's
finaliser (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
The position is inside the mix, so a permutation of the same values has another digest, which an
XOR or a plain sum would miss. It guards against mistakes; signatures guard against enemies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weight_transfer.tensors import Bits

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_BLOCK = 1 << 18
"""Elements mixed at a time: bounds the scratch memory to a few MiB."""


def digest_of(bits: Bits) -> int:
    """Return the digest of a whole tensor, 0 for an empty one."""
    total = 0
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        indices = np.arange(start, start + block.size, dtype=np.uint64)
        total += _sum(indices, block)
    return total & _MASK


def updated(digest: int, indices: NDArray[np.int64], old: Bits, new: Bits) -> int:
    """Return the digest after `bits[indices]` went from `old` to `new`; indices are distinct."""
    total = digest
    for start in range(0, indices.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        positions = indices[part].astype(np.uint64)
        total += _sum(positions, new[part]) - _sum(positions, old[part])
    return total & _MASK


def _sum(indices: NDArray[np.uint64], values: Bits) -> int:
    mixed = (indices + np.uint64(1)) * _GAMMA
    mixed += values.astype(np.uint64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= _M1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _M2
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))

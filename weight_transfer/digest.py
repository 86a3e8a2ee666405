"""Per-tensor digest: a position-mixed 64-bit sum, updatable in O(changed).

digest(t) = Σ_i mix(i, bits[i]) mod 2^64, with mix(i, v) = finalise((i + 1)·γ + v) and SplitMix64's
finaliser (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
The position is inside the mix, so a permutation of the same values has another digest, which an
XOR or a plain sum would miss. It guards against mistakes; signatures guard against enemies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weight_transfer.blocks import Block
from weight_transfer.errors import TensorFormatError
from weight_transfer.kernels.blocks import sum_block
from weight_transfer.kernels.mixing import sum_difference, sum_pending
from weight_transfer.kernels.processor import Flat, processor_of
from weight_transfer.tensors import Bits

MODULUS = 1 << 64


def digest_part(bits: Flat, first: int) -> int:
    """Return what a range adds to the digest of its tensor: the sum over ranges, mod MODULUS."""
    return processor_of(bits).digest(bits, first)


def block_part(bits: Flat, block: Block) -> int:
    """Return what a block adds to the digest of its tensor; `bits` are its own, row by row.

    Raises TensorFormatError for some columns of a tensor on a device.
    """
    if block.is_whole_rows:
        return digest_part(bits, block.first)
    if not isinstance(bits, np.ndarray):
        raise TensorFormatError(
            f"columns {block.columns} are on {bits.place}; shard by rows there, or copy them here"
        )
    return int(sum_block(bits, block.first, block.width, block.row_elements))


def block_growth(old: Flat, new: Flat, block: Block) -> int:
    """Return what that part grows by when the block's own weights go from `old` to `new`."""
    return (block_part(new, block) - block_part(old, block)) % MODULUS


def digest_of(bits: Flat) -> int:
    """Return the digest of a whole tensor, 0 for an empty one."""
    return processor_of(bits).digest(bits, 0)


def updated(digest: int, indices: NDArray[np.int64], old: Bits, new: Bits) -> int:
    """Return the digest after `bits[indices]` went from `old` to `new`; indices are distinct."""
    return (digest + int(sum_difference(indices, old, new))) % MODULUS


def after_write(digest: int, bits: Bits, indices: NDArray[np.int64], values: Bits) -> int:
    """Return the digest that `bits` will have once `values` are written to `indices`."""
    return (digest + int(sum_pending(bits, indices, values))) % MODULUS

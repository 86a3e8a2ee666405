"""The position-mixed sum over a rectangle of a tensor: rows that lie `stride` weights apart."""

from __future__ import annotations

import numpy as np

from weight_transfer.kernels.jit import compiled
from weight_transfer.kernels.mixing import Bits, sum_all


@compiled
def sum_block(bits: Bits, first: int, columns: int, stride: int) -> np.uint64:
    """Sum over rows of `columns` weights each, the first of which has index `first`."""
    total = np.uint64(0)
    for row in range(bits.size // columns):
        total += sum_all(bits[row * columns : (row + 1) * columns], first + row * stride)
    return total

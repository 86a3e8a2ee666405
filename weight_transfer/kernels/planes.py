"""Integers to byte planes and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.jit import compiled


@compiled
def split_plane(
    values: NDArray[np.unsignedinteger[Any]], plane: int, out: NDArray[np.uint8]
) -> None:
    """Write byte number `plane` of each value (0: least significant) to `out`, as long."""
    shift = np.uint64(8 * plane)
    for k in range(values.size):
        out[k] = np.uint64(values[k]) >> shift


@compiled
def join_plane(plane: int, raw: NDArray[np.uint8], out: NDArray[np.unsignedinteger[Any]]) -> None:
    """Add bytes number `plane` to values that have zeros there."""
    shift = np.uint64(8 * plane)
    for k in range(raw.size):
        out[k] |= np.uint64(raw[k]) << shift


@compiled
def all_equal(values: NDArray[np.unsignedinteger[Any]], plane: int) -> int:
    """The byte that all values have at `plane`, -1 when they differ or there are none."""
    if not values.size:
        return -1
    shift = np.uint64(8 * plane)
    first = np.uint8(np.uint64(values[0]) >> shift)
    differing = 0
    for k in range(values.size):
        differing |= np.int64(np.uint8(np.uint64(values[k]) >> shift) != first)
    return -1 if differing else np.int64(first)

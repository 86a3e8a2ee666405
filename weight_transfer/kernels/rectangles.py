"""Positions of a checkpoint tensor and of a parameter that one affine map takes to each other.

`shape`, `sources` and `targets` (strides) are int64 of one length; the sources' nest: each stride
is larger than all that the dimensions after it can add up to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.jit import compiled
from weight_transfer.kernels.mixing import _mix

Bits = NDArray[np.unsignedinteger[Any]]
Int64s = NDArray[np.int64]


@compiled
def locate(
    indices: Int64s,
    origins: Int64s,
    shape: Int64s,
    sources: Int64s,
    targets: Int64s,
    picked: Int64s,
    places: Int64s,
) -> int:
    """Find the `indices` that lie in a map, in order; returns how many do.

    `origins`: (source offset, target offset). Of each found one, its place in `indices` goes to
    `picked` and its place in the parameter to `places`.
    """
    found = 0
    for k in range(indices.size):
        rest = indices[k] - origins[0]
        place = origins[1]
        inside = rest >= 0
        for d in range(shape.size):
            at = rest // sources[d]
            rest -= at * sources[d]
            inside &= at < shape[d]
            place += at * targets[d]
        picked[found] = k
        places[found] = place
        found += np.int64(inside and rest == 0)
    return found


@compiled
def exchange(
    flat: Bits, places: Int64s, values: Bits, indices: Int64s, picked: Int64s
) -> tuple[np.uint64, np.uint64, int]:
    """Write values[picked] at `places` of `flat`, then read all of them back.

    Returns (what the digest's sum lost, what it gained by what was read back, how many weights do
    not read as they were written).
    """
    lost = np.uint64(0)
    for k in range(places.size):
        lost += _mix(np.uint64(indices[picked[k]]), np.uint64(flat[places[k]]))
        flat[places[k]] = values[picked[k]]
    gained = np.uint64(0)
    wrong = 0
    for k in range(places.size):
        read = flat[places[k]]
        gained += _mix(np.uint64(indices[picked[k]]), np.uint64(read))
        wrong += np.int64(read != values[picked[k]])
    return lost, gained, wrong


@compiled
def sum_picked(indices: Int64s, picked: Int64s, values: Bits) -> np.uint64:
    """The digest's sum over values[picked] at indices[picked]."""
    total = np.uint64(0)
    for k in range(picked.size):
        total += _mix(np.uint64(indices[picked[k]]), np.uint64(values[picked[k]]))
    return total


@compiled
def sum_rectangle(
    flat: Bits, origins: Int64s, shape: Int64s, sources: Int64s, targets: Int64s
) -> np.uint64:
    """The digest's sum over a map's weights, read from `flat`, the parameter."""
    last = shape.size - 1
    rows = 1
    for d in range(last):
        rows *= shape[d]
    total = np.uint64(0)
    for row in range(rows):
        source, target, rest = origins[0], origins[1], row
        for back in range(last):
            d = last - 1 - back
            at = rest % shape[d]
            rest //= shape[d]
            source += at * sources[d]
            target += at * targets[d]
        for _ in range(shape[last]):
            total += _mix(np.uint64(source), np.uint64(flat[target]))
            source += sources[last]
            target += targets[last]
    return total

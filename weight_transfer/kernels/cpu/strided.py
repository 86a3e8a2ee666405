"""Positions of a checkpoint tensor and of a parameter that one affine map takes to each other.

`shape`, `sources` and `targets` (strides) are int64 of one length; the sources' nest: each stride
is larger than all that the dimensions after it can add up to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.cpu.digest import mix
from weight_transfer.kernels.cpu.simd import AHEAD, compiled, prefetch

Bits = NDArray[np.unsignedinteger[Any]]
Int64s = NDArray[np.int64]
_BLOCK = 512


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
def exchange(flat: Bits, places: NDArray[np.uint64], old: Bits, new: Bits) -> tuple[int, int]:
    """Write `new` at `places` of `flat`, then read all of it back.

    Returns (0 when all were `old`, 0 when all read as `new`). Bits say more than sums of them. Each
    loop does one thing, so that the processor has many cache misses under way: this takes a third
    of the time that a loop which reads, counts and writes takes.
    """
    stale = flat.dtype.type(0)
    wrong = flat.dtype.type(0)
    for start in range(0, places.size, _BLOCK):
        stop = min(start + _BLOCK, places.size)
        for k in range(start, stop):
            prefetch(flat, np.int64(places[min(k + AHEAD, places.size - 1)]))
            stale |= flat[places[k]] ^ old[k]
        for k in range(start, stop):
            flat[places[k]] = new[k]
        for k in range(start, stop):
            wrong |= flat[places[k]] ^ new[k]
    return np.int64(stale), np.int64(wrong)


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
            total += mix(np.uint64(source), np.uint64(flat[target]))
            source += sources[last]
            target += targets[last]
    return total

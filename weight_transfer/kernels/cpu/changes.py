"""Kernels of weight changes, forth and back: gaps and zigzag coded ulp deltas.

gap    distance to the previous changed weight, less one
code   new − old of the integer views, wrapped to their width and zigzag coded; never 0

Strided copies: positions of a checkpoint tensor and of a parameter that one affine map takes to
each other.
`shape`, `sources` and `targets` (strides) are int64 of one length; the sources' nest: each stride
is larger than all that the dimensions after it can add up to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.cpu.digest import mix
from weight_transfer.kernels.cpu.simd import (
    AHEAD,
    COMPARED,
    compiled,
    differing,
    prefetch,
    trailing_zeros,
)

Bits = NDArray[np.unsignedinteger[Any]]
Int64s = NDArray[np.int64]
_STRIDED_BLOCK = 512


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
    for start in range(0, places.size, _STRIDED_BLOCK):
        stop = min(start + _STRIDED_BLOCK, places.size)
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


# Weights compared before what differs is looked at; meanwhile the next ones are fetched.
_BLOCK = 4096
_OUTSIDE, _NOTHING = -1, -2


@dataclass(frozen=True, slots=True)
class Deltas:
    """Gaps u32[n] and codes[n], as wide as the weights, of one range's changes.

    `growth`: of the tensor's digest, mod 2^64.
    """

    gaps: NDArray[np.uint32]
    codes: Bits
    growth: int

    @property
    def count(self) -> int:
        return int(self.codes.size)


def find_changes(old: Bits, new: Bits, room: int, first: int = 0) -> Deltas | None:
    """Compare two flat ranges of one width; None when more than `room` weights changed.

    `first`: index of their first weight in its tensor, which the digest depends on.
    """
    room = min(room, old.size)
    gaps = np.empty(room + _BLOCK, np.uint32)
    codes = np.empty(room + _BLOCK, old.dtype)
    count, growth = _scan(old, new, gaps, codes, room, first)
    if not 0 <= count <= room:
        return None
    return Deltas(gaps[:count], codes[:count], int(growth))


def apply_changes(
    old: Bits, gaps: NDArray[np.uint32], codes: Bits
) -> tuple[NDArray[np.int64], Bits]:
    """Return (flat indices, new values). Raises ValueError for changes that are none of `old`."""
    indices, values = np.empty(codes.size, np.int64), np.empty(codes.size, old.dtype)
    state = _expand(old, gaps, codes, indices, values)
    if state == _OUTSIDE:
        raise ValueError("a changed index lies outside the chunk's rows")
    if state == _NOTHING:
        raise ValueError("a change of nothing is listed")
    return indices, values


def mark_changes(old: Bits, new: Bits) -> tuple[NDArray[np.uint8], Bits]:
    """Return (a bit for each weight, least significant first; codes of the changed ones)."""
    bitmap = np.zeros((old.size + 7) // 8, np.uint8)
    codes = np.empty(old.size, old.dtype)
    count = _mark(old, new, bitmap, codes)
    return bitmap, codes[:count].copy()


def gaps_of(bitmap: NDArray[np.uint8], size: int, count: int) -> NDArray[np.uint32] | None:
    """Return the gaps that a bitmap over `size` weights stands for, unless it marks not `count`."""
    gaps = np.empty(count, np.uint32)
    return gaps if _gaps_of(bitmap, size, gaps) == count else None


@compiled
def _scan(
    old: Bits, new: Bits, gaps: NDArray[np.uint32], codes: Bits, room: int, first: int
) -> tuple[int, np.uint64]:
    """Returns (found, growth of the digest); found is -1 when the room was too small.

    Block by block: mark, list the marks that are not zero, list the weights, write what is kept of
    them. Branches that depend on the data would be mispredicted for each change; there are none but
    for weights that share a mark. All other loops are for the vector units.
    """
    marks = np.empty(_BLOCK // COMPARED + 1, np.uint64)
    places = np.empty(_BLOCK + 1, np.int32)
    pairs = np.empty((2, _BLOCK), np.uint64)
    growth = np.uint64(0)
    found = 0
    last = -1
    for start in range(0, old.size, _BLOCK):
        places[0] = last - start
        count = _places_of(old, new, start, marks, places)
        before, after = old[start : start + _BLOCK], new[start : start + _BLOCK]
        _take(places, count, before, after, pairs)
        _write_gaps(places, count, gaps[found:])
        _write_codes(pairs, count, codes[found:])
        growth += _growth(places, count, pairs, first + start)
        found += count
        last = start + np.int64(places[count])
        if found > room:
            return -1, growth
    return found, growth


@compiled
def _places_of(
    old: Bits, new: Bits, start: int, marks: NDArray[np.uint64], places: NDArray[np.int32]
) -> int:
    """List the weights of a block that differ from `places[1]` on; returns how many there are.

    A mark in the making: COMPARED bits, above them where they belong.
    """
    size = min(_BLOCK, old.size - start)
    whole = size // COMPARED
    marked = 0
    for k in range(whole):
        at = start + k * COMPARED
        ahead = min(at + _BLOCK, old.size - 1)
        prefetch(old, ahead)
        prefetch(new, ahead)
        mark = differing(old, new, at)
        marks[marked] = mark | (np.uint64(k) << np.uint64(COMPARED))
        marked += np.int64(mark != np.uint64(0))
    count = 0
    for k in range(marked):
        first = np.int64(marks[k] >> np.uint64(COMPARED)) * COMPARED
        left = marks[k] & np.uint64((1 << COMPARED) - 1)
        while True:
            count += 1
            places[count] = first + trailing_zeros(left)
            left &= left - np.uint64(1)
            if left == np.uint64(0):
                break
    for at in range(whole * COMPARED, size):
        if old[start + at] != new[start + at]:
            count += 1
            places[count] = at
    return count


@compiled
def _write_gaps(places: NDArray[np.int32], count: int, gaps: NDArray[np.uint32]) -> None:
    for k in range(count):
        gaps[k] = places[k + 1] - places[k] - 1


@compiled
def _take(
    places: NDArray[np.int32], count: int, before: Bits, after: Bits, pairs: NDArray[np.uint64]
) -> None:
    for k in range(count):
        at = places[k + 1]
        pairs[0, k] = before[at]
        pairs[1, k] = after[at]


@compiled
def _write_codes(pairs: NDArray[np.uint64], count: int, codes: Bits) -> None:
    bits = np.uint64(8 * codes.itemsize)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - bits)
    one = np.uint64(1)
    for k in range(count):
        delta = (pairs[1, k] - pairs[0, k]) & mask
        codes[k] = (delta << one) ^ (np.uint64(0) - (delta >> (bits - one)))


@compiled
def _growth(
    places: NDArray[np.int32], count: int, pairs: NDArray[np.uint64], first: int
) -> np.uint64:
    total = np.uint64(0)
    for k in range(count):
        index = np.uint64(first + np.int64(places[k + 1]))
        total += mix(index, pairs[1, k]) - mix(index, pairs[0, k])
    return total


@compiled
def _expand(
    old: Bits, gaps: NDArray[np.uint32], codes: Bits, indices: NDArray[np.int64], values: Bits
) -> int:
    one = np.uint64(1)
    index = -1
    for k in range(gaps.size):
        index += np.int64(gaps[k]) + 1
        indices[k] = index
    if index >= old.size:
        return _OUTSIDE
    nothing = 0
    for k in range(gaps.size):
        prefetch(old, indices[min(k + AHEAD, gaps.size - 1)])
        code = np.uint64(codes[k])
        delta = (code >> one) ^ (np.uint64(0) - (code & one))
        values[k] = np.uint64(old[indices[k]]) + delta
        nothing |= np.int64(code == np.uint64(0))
    return _NOTHING if nothing else 0


@compiled
def _mark(old: Bits, new: Bits, bitmap: NDArray[np.uint8], codes: Bits) -> int:
    bits = np.uint64(8 * codes.itemsize)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - bits)
    one = np.uint64(1)
    found = 0
    for index in range(old.size):
        delta = (np.uint64(new[index]) - np.uint64(old[index])) & mask
        sign = np.uint64(0) - (delta >> (bits - one))
        codes[found] = ((delta << one) ^ sign) & mask
        changed = np.int64(delta != np.uint64(0))
        bitmap[index >> 3] |= np.uint8(changed << (index & 7))
        found += changed
    return found


@compiled
def _gaps_of(bitmap: NDArray[np.uint8], size: int, gaps: NDArray[np.uint32]) -> int:
    found = 0
    following = 0
    for index in range(8 * bitmap.size):
        if bitmap[index >> 3] >> np.uint8(index & 7) & np.uint8(1):
            if found == gaps.size or index >= size:
                return -1
            gaps[found] = index - following
            following = index + 1
            found += 1
    return found

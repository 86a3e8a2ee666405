"""Kernels of host memory, by numba: the tensor digest, changes forth and back, strided copies.

gap    distance to the previous changed weight, less one
code   new − old of the integer views, wrapped to their width and zigzag coded; never 0

Digests (`weight_transfer.format.digest`) are summed over whole ranges, single weights and
rectangles whose rows lie `stride` weights apart.

Strided copies: positions of a checkpoint tensor and of a parameter that one affine map takes to
each other. `shape`, `sources` and `targets` (strides) are int64 of one length; the sources' nest:
each stride is larger than all that the dimensions after it can add up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_transfer.format.tensors import Bits, WeightClass
from weight_transfer.kernels import range_coder
from weight_transfer.kernels.processor import (
    CLASSES,
    Bytes,
    Change,
    Exchange,
    Int64s,
    Marks,
    check_indices,
)
from weight_transfer.kernels.simd import (
    AHEAD,
    COMPARED,
    compiled,
    differing,
    prefetch,
    trailing_zeros,
)

_MODULUS = 1 << 64
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)
_STRIDED_BLOCK = 512
# Weights compared before what differs is looked at; meanwhile the next ones are fetched.
_BLOCK = 4096
_OUTSIDE, _NOTHING = -1, -2


@compiled
def mix(index: np.uint64, value: np.uint64) -> np.uint64:
    """Return what a weight of this index and value adds to the digest, mod 2^64."""
    mixed = (index + np.uint64(1)) * _GAMMA + value
    mixed = (mixed ^ (mixed >> _S1)) * _M1
    mixed = (mixed ^ (mixed >> _S2)) * _M2
    return mixed ^ (mixed >> _S3)


@compiled
def sum_all(bits: Bits, first: int) -> np.uint64:
    """Return the digest's sum over a flat range whose first weight has index `first` in its
    tensor."""
    total = np.uint64(0)
    for k in range(bits.size):
        total += mix(np.uint64(first + k), np.uint64(bits[k]))
    return total


@compiled
def sum_difference(indices: NDArray[np.int64], old: Bits, new: Bits) -> np.uint64:
    """Return the increase of the digest when the weights at `indices` go from `old` to `new`."""
    total = np.uint64(0)
    for k in range(indices.size):
        index = np.uint64(indices[k])
        total += mix(index, np.uint64(new[k])) - mix(index, np.uint64(old[k]))
    return total


@compiled
def sum_pending(old: Bits, indices: NDArray[np.int64], values: Bits) -> np.uint64:
    """Return the increase that the digest will have when `values` are written to `old` at
    `indices`."""
    total = np.uint64(0)
    for k in range(indices.size):
        prefetch(old, indices[min(k + AHEAD, indices.size - 1)])
        at = indices[k]
        index = np.uint64(at)
        total += mix(index, np.uint64(values[k])) - mix(index, np.uint64(old[at]))
    return total


@compiled
def scatter(target: Bits, indices: NDArray[np.int64], values: Bits) -> None:
    """Overwrite `target` at `indices` with `values`, in place."""
    for k in range(indices.size):
        prefetch(target, indices[min(k + AHEAD, indices.size - 1)])
        target[indices[k]] = values[k]


@compiled
def scatter_and_sum(target: Bits, indices: NDArray[np.int64], values: Bits) -> np.uint64:
    """Write `values` to `target` at `indices`; return the increase of the target's digest."""
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
    """Return the digest's sum over a block of rows of `columns` weights each.

    The rows begin `stride` indices apart in the tensor, the first at index `first`.
    """
    total = np.uint64(0)
    for row in range(bits.size // columns):
        total += sum_all(bits[row * columns : (row + 1) * columns], first + row * stride)
    return total


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
    """Find which of ascending `indices` an affine map contains; return how many it does.

    `origins`: (source offset, target offset). For each contained index, its position in `indices`
    is written to `picked` and its place in the parameter to `places`.
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

    Return two numbers: 0 if all weights were `old` before, and 0 if all read as `new` after. Bits
    say more than sums of them. Each loop does one thing, so that the processor has many cache
    misses under way: this takes a third of the time that a loop which reads, counts and writes
    takes.
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
    """Return the digest's sum over the weights of an affine map, read from the parameter `flat`."""
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


def apply_changes(old: Bits, gaps: NDArray[np.uint32], codes: Bits) -> Change:
    """Return the change of `old` that gaps and codes say, without writing it.

    Raises ValueError for an index outside of `old` and for a change of nothing.
    """
    indices = np.empty(codes.size, np.int64)
    replaced, values = np.empty((2, codes.size), old.dtype)
    state = _expand(old, gaps, codes, indices, replaced, values)
    if state == _OUTSIDE:
        raise ValueError("a changed index lies outside the chunk's rows")
    if state == _NOTHING:
        raise ValueError("a change of nothing is listed")
    return Change(indices, replaced, values)


def gaps_of(bitmap: NDArray[np.uint8], size: int, count: int) -> NDArray[np.uint32] | None:
    """Return the gaps between the set bits of a bitmap over `size` weights, None unless `count`
    are set."""
    gaps = np.empty(count, np.uint32)
    return gaps if _gaps_of(bitmap, size, gaps) == count else None


@compiled
def _scan(
    old: Bits, new: Bits, gaps: NDArray[np.uint32], codes: Bits, room: int, first: int
) -> tuple[int, np.uint64]:
    """Write gaps and codes of the changed weights; return (their number, increase of the digest).

    The number is -1 when more than `room` weights changed. Block by block: mark, list the marks
    that are not zero, list the weights, write what is kept of them. Branches that depend on the
    data would be mispredicted for each change; there are none but for weights that share a mark.
    All other loops are for the vector units.
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
    """Write the places of a block's changed weights to `places` from index 1 on.

    Return their number. A mark holds COMPARED bits, and above them the number of the group of
    weights that it marks.
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
    old: Bits,
    gaps: NDArray[np.uint32],
    codes: Bits,
    indices: NDArray[np.int64],
    replaced: Bits,
    values: Bits,
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
        replaced[k] = old[indices[k]]
        values[k] = np.uint64(replaced[k]) + delta
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


@dataclass(frozen=True, slots=True)
class CpuDifference:
    """Changed weights of one range of `old` in host memory: gaps u32[n] and codes [n].

    `growth`: increase of the tensor's digest, mod 2^64.
    """

    old: Bits
    gaps: NDArray[np.uint32]
    codes: Bits
    growth: int

    @property
    def count(self) -> int:
        return int(self.codes.size)

    def class_counts(self, kind: WeightClass) -> Int64s:
        counts = np.zeros(CLASSES, np.int64)
        range_coder.class_counts(self.old, self.gaps, kind.shift, kind.mask, counts)
        return counts

    def by_class(
        self, kind: WeightClass, ends: Bytes, present: Bytes, starts: Int64s
    ) -> tuple[NDArray[np.uint32], Bits]:
        """Return (rank gaps, codes) of the changes sorted by class; `starts` is overwritten."""
        gaps, codes = np.empty_like(self.gaps), np.empty_like(self.codes)
        changes, classes = (self.old, self.gaps, self.codes), (kind.shift, kind.mask)
        range_coder.by_class(*changes, *classes, ends, present, starts, gaps, codes)
        return gaps, codes


@dataclass(frozen=True, slots=True)
class CpuExchange:
    """Staged changes of host memory, where nothing has to be copied before they are written."""

    changes: tuple[tuple[Bits, Change], ...]

    def run(self, *, back: bool = False) -> Int64s:
        """Write all new values, or all old ones with `back`.

        Return counts as `Exchange.run` does.
        """
        counts = np.zeros((len(self.changes), 2), np.int64)
        for row, (target, change) in enumerate(self.changes):
            old, new = (change.new, change.old) if back else (change.old, change.new)
            # Unsigned indices spare the kernel the check whether they count from the end.
            at = change.indices.view(np.uint64)
            counts[row] = np.array(exchange(target, at, old, new)) != 0
        return counts


# This module is a `Processor`.


def compare(old: Bits, new: Bits, room: int, first: int = 0) -> CpuDifference | None:
    """Return the changed weights of two flat ranges, None when more than `room` weights changed.

    `first`: index of the ranges' first weight in its tensor, which the digest depends on.
    """
    room = min(room, old.size)
    gaps = np.empty(room + _BLOCK, np.uint32)
    codes = np.empty(room + _BLOCK, old.dtype)
    count, growth = _scan(old, new, gaps, codes, room, first)
    if not 0 <= count <= room:
        return None
    return CpuDifference(old, gaps[:count], codes[:count], int(growth))


def mark(old: Bits, new: Bits, first: int) -> Marks:
    """Return bitmap and codes of the changes between two ranges, however many weights changed."""
    bitmap = np.zeros((old.size + 7) // 8, np.uint8)
    codes = np.empty(old.size, old.dtype)
    count = _mark(old, new, bitmap, codes)
    growth = (digest(new, first) - digest(old, first)) % _MODULUS
    return Marks(bitmap, codes[:count].copy(), growth)


def read(bits: Bits) -> Bits:
    """Return the range itself, which is in host memory."""
    return bits


def digest(bits: Bits, first: int) -> int:
    """Return what a range that begins at index `first` adds to its tensor's digest, mod 2^64."""
    return int(sum_all(bits, first))


def stage(changes: Sequence[tuple[Bits, Change]], resident_bytes: int) -> Exchange:
    """Return changes of host memory, ready to be written.

    Raises IndexError for an index outside.
    """
    del resident_bytes
    check_indices(changes)
    return CpuExchange(tuple(changes))

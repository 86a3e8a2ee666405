"""Which weights changed and by how much, and back: gaps and zigzag coded ulp deltas.

gap    distance to the previous changed weight, less one
code   new − old of the integer views, wrapped to their width and zigzag coded; never 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.jit import compiled

Bits = NDArray[np.unsignedinteger[Any]]
_WORD = 8
# Words between two looks at what was found; their marks stay in the first level cache.
_BLOCK = 2048
_OUTSIDE, _NOTHING = -1, -2


@dataclass(frozen=True, slots=True)
class Changes:
    """Of one range: `gaps` u32[n], `codes` as wide as the weights[n]."""

    gaps: NDArray[np.uint32]
    codes: Bits

    @property
    def count(self) -> int:
        """Changed weights."""
        return int(self.codes.size)


def find_changes(old: Bits, new: Bits, room: int) -> Changes | None:
    """Compare two flat ranges of one width; None when more than `room` weights changed."""
    lanes = _WORD // old.itemsize
    border = old.size // lanes * lanes
    # Writes go ahead of what is found by the lanes of a block at most.
    spare = min(room, old.size) + _BLOCK * lanes + 1
    gaps = np.empty(spare, np.uint32)
    codes = np.empty(spare, old.dtype)
    found, following = _scan(
        old[:border].view(np.uint64), new[:border].view(np.uint64), gaps, codes, room
    )
    if found >= 0:
        found = _scan_tail(old[border:], new[border:], gaps, codes, found, following - border)
    if not 0 <= found <= room:
        return None
    return Changes(gaps[:found], codes[:found])


def apply_changes(old: Bits, changes: Changes) -> tuple[NDArray[np.int64], Bits]:
    """Return (flat indices, new values). Raises ValueError for changes that are none of `old`."""
    indices = np.empty(changes.count, np.int64)
    values = np.empty(changes.count, old.dtype)
    state = _expand(old, changes.gaps, changes.codes, indices, values)
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
    old: NDArray[np.uint64],
    new: NDArray[np.uint64],
    gaps: NDArray[np.uint32],
    codes: Bits,
    room: int,
) -> tuple[int, int]:
    """Returns (found, index after the last one); found is -1 when the room was too small.

    No branch depends on the data but the loop over words that differ: at 1 to 2% of changed
    weights half of all branches on cache lines would be mispredicted.
    """
    width = codes.itemsize
    lanes = 8 // width
    bits = np.uint64(8 * width)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - bits)
    one = np.uint64(1)
    marks = np.empty(_BLOCK, np.uint32)
    found = 0
    following = 0
    for start in range(0, old.size, _BLOCK):
        stop = min(start + _BLOCK, old.size)
        marked = 0
        for word in range(start, stop):
            marks[marked] = word - start
            marked += np.int64(old[word] != new[word])
        if found > room:
            return -1, following
        for k in range(marked):
            word = start + np.int64(marks[k])
            before = old[word]
            after = new[word]
            for lane in range(lanes):
                shift = np.uint64(lane) * bits
                delta = ((after >> shift) - (before >> shift)) & mask
                sign = np.uint64(0) - (delta >> (bits - one))
                index = word * lanes + lane
                gaps[found] = index - following
                codes[found] = ((delta << one) ^ sign) & mask
                if delta != np.uint64(0):
                    found += 1
                    following = index + 1
    return found, following


@compiled
def _scan_tail(
    old: Bits,
    new: Bits,
    gaps: NDArray[np.uint32],
    codes: Bits,
    found: int,
    following: int,
) -> int:
    bits = np.uint64(8 * codes.itemsize)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - bits)
    one = np.uint64(1)
    for index in range(old.size):
        if old[index] != new[index]:
            delta = (np.uint64(new[index]) - np.uint64(old[index])) & mask
            sign = np.uint64(0) - (delta >> (bits - one))
            gaps[found] = index - following
            codes[found] = ((delta << one) ^ sign) & mask
            found += 1
            following = index + 1
    return found


@compiled
def _expand(
    old: Bits, gaps: NDArray[np.uint32], codes: Bits, indices: NDArray[np.int64], values: Bits
) -> int:
    one = np.uint64(1)
    index = -1
    for k in range(gaps.size):
        index += np.int64(gaps[k]) + 1
        if index >= old.size:
            return _OUTSIDE
        code = np.uint64(codes[k])
        if code == np.uint64(0):
            return _NOTHING
        delta = (code >> one) ^ (np.uint64(0) - (code & one))
        indices[k] = index
        values[k] = np.uint64(old[index]) + delta
    return 0


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

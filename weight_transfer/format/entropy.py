"""The compact payload: changes by class of the old weight, entropy coded.

payload  head | classes | coded | raw
head     class shift u8 | class bits u8 | lowest u8 | highest u8 | classes u16 | coded bytes u32
         | raw bytes u32
class    number u8 | Rice parameter u8 | changed weights u32; the first class holds all weights from
         lowest on, the last one all up to highest
coded    range coder: the unary part of each rank gap, how long each change is, its second bit
raw      bits, least significant first: low part of each rank gap, sign, low part of each change
Changes come class by class. How likely a change is depends on the class alone, see
`kernels.range_coder`; the receiver has the old weights and thereby the classes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import ChunkFormatError
from weight_transfer.format.tensors import Bits, WeightClass
from weight_transfer.kernels import range_coder
from weight_transfer.kernels import range_coder as kernels
from weight_transfer.kernels.processor import Change, Difference

_HEAD = struct.Struct("<BBBBHII")
_CLASS = struct.Struct("<BBI")
_MOST_RICE = 30
# Share of changes at either end of the classes that are merged: decoding scans all per class.
_RARE = 0.005


@dataclass(frozen=True, slots=True)
class _Classes:
    """Magnitude classes that hold changes, ascending, with Rice parameter and number of changes."""

    lowest: int
    highest: int
    numbers: NDArray[np.uint8]
    rice: list[int]
    counts: NDArray[np.int64]

    def ends(self) -> NDArray[np.uint8]:
        """Return the numbers of the (lowest, first, last, highest) class, u8.

        Weights of classes from lowest to first are counted with first, and those from last to
        highest with last.
        """
        first, last = int(self.numbers[0]), int(self.numbers[-1])
        return np.array([self.lowest, first, last, self.highest], np.uint8)

    def starts(self) -> NDArray[np.int64]:
        starts: NDArray[np.int64] = np.cumsum(self.counts) - self.counts
        return starts

    def parts(self) -> list[slice]:
        ends = [0, *(int(end) for end in np.cumsum(self.counts))]
        return [slice(a, b) for a, b in pairwise(ends)]


def encode_compact(difference: Difference, kind: WeightClass) -> bytes:
    """Return the payload of the `compact` encoding of a range's changes, of which there is at
    least one."""
    classes = _gathered(difference.class_counts(kind))
    gaps, codes = difference.by_class(kind, classes.ends(), classes.numbers, classes.starts())
    parts = classes.parts()
    classes.rice.extend(_rice(gaps[part]) for part in parts)
    coded, raw = _entropy_coded(gaps, codes, parts, classes.rice)
    which = kind.shift, kind.bits, classes.lowest, classes.highest, classes.numbers.size
    head = _HEAD.pack(*which, coded.size, raw.size)
    rows = zip(classes.numbers, classes.rice, classes.counts, strict=True)
    table = b"".join(_CLASS.pack(*row) for row in rows)
    return b"".join((head, table, coded.tobytes(), raw.tobytes()))


def decode_compact(payload: memoryview, changed: int, old: Bits) -> Change:
    """Return the change of a range's old weights that a `compact` payload says.

    Raises ChunkFormatError for bytes that no encoder writes.
    """
    if len(payload) < _HEAD.size:
        raise ChunkFormatError("compact chunk ends in its head; fetch it again")
    shift, width, lowest, highest, present, coded_size, raw_size = _HEAD.unpack_from(payload)
    table_size = present * _CLASS.size
    if width > 8 or shift + width > 8 * old.itemsize:
        raise ChunkFormatError("compact chunk is not of weights like these; fetch it again")
    if len(payload) != _HEAD.size + table_size + coded_size + raw_size:
        raise ChunkFormatError("compact chunk has another length than its head says")
    kind = WeightClass(shift, width)
    classes = _table(payload[_HEAD.size : _HEAD.size + table_size], kind, lowest, highest)
    if int(classes.counts.sum()) != changed:
        raise ChunkFormatError("compact chunk counts other changes than its header")
    body = np.frombuffer(payload, np.uint8)[_HEAD.size + table_size :]
    gaps, codes = _entropy_decoded(body, coded_size, classes, changed, old)
    indices = np.empty(changed, np.int64)
    replaced, values = np.empty((2, changed), old.dtype)
    wrong = kernels.place(
        old,
        shift,
        kind.mask,
        classes.ends(),
        classes.numbers,
        gaps,
        codes,
        classes.starts(),
        classes.counts,
        indices,
        replaced,
        values,
    )
    if wrong:
        raise ChunkFormatError("a changed index lies outside the chunk's rows")
    return Change(indices, replaced, values)


def split(bits: Bits, field: int) -> Bits:
    """Return the weights of `field` bits (4, 6 or 32) that share the elements of `bits`.

    They begin with the lowest bits. Raises ValueError if they do not fill the elements.
    """
    if field == 32:
        return bits.view("<u4")
    raw: NDArray[np.uint8] = bits.view(np.uint8)
    if field == 4:
        return np.stack((raw & 15, raw >> 4), axis=1).ravel()
    if raw.size % 3:
        raise ValueError(f"{raw.size} bytes are not filled by weights of six bits")
    first, second, third = raw.reshape(-1, 3).T
    parts = (first, first >> 6 | second << 2, second >> 4 | third << 4, third >> 2)
    return np.stack([part & 63 for part in parts], axis=1).ravel()


def join(weights: Bits, field: int, dtype: np.dtype[Any]) -> Bits:
    """Return elements of `dtype` that the weights share, as `split` takes them apart.

    Raises ValueError for a weight of more than `field` bits.
    """
    if field == 32:
        return weights.view(dtype)
    if weights.size and int(weights.max()) >> field:
        raise ValueError(f"a weight has more than {field} bits")
    if field == 4:
        return (weights[::2] | weights[1::2] << 4).view(dtype)
    one, two, three, four = weights.reshape(-1, 4).T
    parts = (one | two << 6, two >> 2 | three << 4, three >> 4 | four << 2)
    return np.stack(parts, axis=1).ravel().view(dtype)


def _entropy_coded(
    gaps: NDArray[np.uint32], codes: Bits, parts: list[slice], rice: list[int]
) -> tuple[range_coder.Bytes, range_coder.Bytes]:
    sizes = [kernels.size_of(gaps[p], codes[p], k) for p, k in zip(parts, rice, strict=True)]
    decisions, raw_bits = (sum(column) for column in zip(*sizes, strict=True))
    coded = np.empty(decisions * range_coder.WORST_BITS // 8 + 16, np.uint8)
    raw = np.empty(raw_bits // 8 + 8, np.uint8)
    state, bits = range_coder.encoder(), np.zeros(3, np.int64)
    for part, k in zip(parts, rice, strict=True):
        odds, seen = range_coder.contexts(kernels.CONTEXTS)
        kernels.encode_class(gaps[part], codes[part], k, state, coded, bits, raw, odds, seen)
    return coded[: range_coder.flush(state, coded)], raw[: kernels.finish_raw(bits, raw)]


def _entropy_decoded(
    body: range_coder.Bytes, coded_size: int, classes: _Classes, changed: int, old: Bits
) -> tuple[NDArray[np.uint32], Bits]:
    coded, raw = body[:coded_size], body[coded_size:]
    gaps, codes = np.empty(changed, np.uint32), np.empty(changed, old.dtype)
    state, bits = np.zeros(5, np.int64), np.zeros(3, np.int64)
    range_coder.begin(state, coded)
    left = old.size
    for part, k in zip(classes.parts(), classes.rice, strict=True):
        odds, seen = range_coder.contexts(kernels.CONTEXTS)
        left = kernels.decode_class(
            gaps[part], codes[part], k, left, state, coded, bits, raw, odds, seen
        )
        if left == kernels.WRONG:
            raise ChunkFormatError("compact chunk holds a gap or a change that cannot be")
    if int(state[2]) != coded.size or int(bits[2]) != raw.size:
        raise ChunkFormatError("compact chunk is longer or shorter than its changes")
    return gaps, codes


def _gathered(counts: NDArray[np.int64]) -> _Classes:
    """Return the classes with changes; rare ones at both ends are merged with their neighbour."""
    changed = np.flatnonzero(counts)
    below, total = np.cumsum(counts), int(counts.sum())
    first = int(np.searchsorted(below, total * _RARE, side="right"))
    last = max(first, int(np.searchsorted(below, total * (1 - _RARE))))
    gathered = counts.copy()
    gathered[first] += gathered[:first].sum()
    gathered[last] += gathered[last + 1 :].sum()
    numbers = (first + np.flatnonzero(gathered[first : last + 1])).astype(np.uint8)
    return _Classes(int(changed[0]), int(changed[-1]), numbers, [], gathered[numbers])


def _rice(gaps: NDArray[np.uint32]) -> int:
    """Return the Rice parameter for rank gaps: short unary parts and nearly uniform low parts."""
    return min(_MOST_RICE, max(0, int(float(gaps.mean()) * 0.7).bit_length() - 1))


def _table(table: memoryview, kind: WeightClass, lowest: int, highest: int) -> _Classes:
    rows = list(_CLASS.iter_unpack(table))
    numbers = [number for number, _, _ in rows]
    order = [lowest, *numbers, highest, kind.mask]
    if not rows or any(one > other for one, other in pairwise(order)):
        raise ChunkFormatError("compact chunk lists its classes in no order")
    if len(set(numbers)) != len(rows) or any(k > _MOST_RICE or not n for _, k, n in rows):
        raise ChunkFormatError("compact chunk lists a class that cannot be")
    counts = np.array([count for _, _, count in rows], np.int64)
    return _Classes(lowest, highest, np.array(numbers, np.uint8), [k for _, k, _ in rows], counts)

"""The compact payload: changes by class of the old weight, entropy coded.

payload  head | classes | coded | raw
head     class shift u8 | class bits u8 | lanes u8 | classes u16 | coded bytes u32 | raw bytes u32
class    number u8 | Rice parameter u8 | changed weights u32, for each lane
coded    range coder: the unary part of each rank gap, how long each change is, its second bit
raw      bits, least significant first: low part of each rank gap, sign, low part of each change
Changes come class by class, lane by lane. What is likely depends on the class alone, see
`kernels.classes`; the receiver has the old weights and thereby the classes.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import ChunkFormatError
from weight_transfer.kernels import classes as kernels
from weight_transfer.kernels import ranges
from weight_transfer.kernels.changes import Bits, Changes
from weight_transfer.tensors import WeightClass

_HEAD = struct.Struct("<BBBHII")
_CLASS = struct.Struct("<BB")
_COUNT = np.dtype("<u4")
# Shorter ranges have one lane: what lanes cost is then more than what they save.
_LEAST_LANES = 1 << 16
_MOST_RICE = 30


class _Lanes:
    """How a range of `size` weights is cut."""

    def __init__(self, size: int) -> None:
        self.count = kernels.LANES if size >= _LEAST_LANES else 1
        self.size = -(-size // self.count)


def encode_compact(old: Bits, changes: Changes, kind: WeightClass) -> bytes:
    """Encode changes, at least one, of the range `old`."""
    lanes = _Lanes(old.size)
    counts = np.zeros((kernels.LANES, kernels.CLASSES), np.int64)
    kernels.class_counts(old, changes.gaps, kind.shift, kind.mask, lanes.size, counts)
    starts = _starts(counts)
    gaps, codes = np.empty_like(changes.gaps), np.empty_like(changes.codes)
    kernels.by_class(
        old, changes.gaps, changes.codes, kind.shift, kind.mask, lanes.size, starts, gaps, codes
    )
    # The kernel moved each start to its part's end.
    present = [int(n) for n in np.flatnonzero(counts.any(axis=0))]
    parts = {n: [slice(e - c, e) for e, c in zip(starts[:, n], counts[:, n], strict=True)]
             for n in present}  # fmt: skip
    rice = {n: _rice(gaps[parts[n][0].start : parts[n][-1].stop]) for n in present}
    sizes = [kernels.size_of(gaps[p], codes[p], rice[n]) for n in present for p in parts[n]]
    decisions, raw_bits = (sum(column) for column in zip(*sizes, strict=True))
    coded = np.empty(decisions * ranges.WORST_BITS // 8 + 16, np.uint8)
    raw = np.empty(raw_bits // 8 + 8, np.uint8)
    state, bits = ranges.encoder(), np.zeros(3, np.int64)
    for n in present:
        odds, seen = ranges.contexts(kernels.CONTEXTS)
        for part in parts[n]:
            kernels.encode_class(
                gaps[part], codes[part], rice[n], state, coded, bits, raw, odds, seen
            )
    coded = coded[: ranges.flush(state, coded)]
    raw = raw[: kernels.finish_raw(bits, raw)]
    head = _HEAD.pack(kind.shift, kind.bits, lanes.count, len(present), coded.size, raw.size)
    table = b"".join(
        _CLASS.pack(n, rice[n]) + counts[: lanes.count, n].astype(_COUNT).tobytes() for n in present
    )
    return b"".join((head, table, coded.tobytes(), raw.tobytes()))


def decode_compact(payload: memoryview, changed: int, old: Bits) -> tuple[NDArray[np.int64], Bits]:
    """Return (indices, new values). Raises ChunkFormatError for what no encoder writes."""
    if len(payload) < _HEAD.size:
        raise ChunkFormatError("compact chunk ends in its head; fetch it again")
    shift, width, lane_count, present, coded_size, raw_size = _HEAD.unpack_from(payload)
    kind, lanes = WeightClass(shift, width), _Lanes(old.size)
    table_size = present * (_CLASS.size + lane_count * _COUNT.itemsize)
    if lane_count != lanes.count or width > 8 or shift + width > 8 * old.itemsize:
        raise ChunkFormatError("compact chunk is not of weights like these; fetch it again")
    if len(payload) != _HEAD.size + table_size + coded_size + raw_size:
        raise ChunkFormatError("compact chunk has another length than its head says")
    numbers, rice, counts = _table(payload[_HEAD.size :], present, lane_count, kind)
    if int(counts.sum()) != changed or int(counts.max(initial=0)) > lanes.size:
        raise ChunkFormatError("compact chunk counts other changes than its header")
    body = np.frombuffer(payload, np.uint8)[_HEAD.size + table_size :]
    coded, raw = body[:coded_size], body[coded_size:]
    gaps, codes = np.empty(changed, np.uint32), np.empty(changed, old.dtype)
    starts = _starts(counts)
    state, bits = np.zeros(5, np.int64), np.zeros(3, np.int64)
    ranges.begin(state, coded)
    for n, k in zip(numbers, rice, strict=True):
        odds, seen = ranges.contexts(kernels.CONTEXTS)
        for lane in range(lane_count):
            part = slice(starts[lane, n], starts[lane, n] + counts[lane, n])
            wrong = kernels.decode_class(
                gaps[part], codes[part], k, lanes.size, state, coded, bits, raw, odds, seen
            )
            if wrong:
                raise ChunkFormatError("compact chunk holds a gap or a change that cannot be")
    if int(state[2]) != coded_size or int(bits[2]) != raw_size:
        raise ChunkFormatError("compact chunk is longer or shorter than its changes")
    indices, values = np.empty(changed, np.int64), np.empty(changed, old.dtype)
    by_lane = counts.sum(axis=1)
    firsts = np.cumsum(by_lane) - by_lane
    wrong = kernels.place(
        old, shift, kind.mask, lanes.size, gaps, codes, starts, counts, firsts, indices, values
    )
    if wrong:
        raise ChunkFormatError("a changed index lies outside the chunk's rows")
    return indices, values


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each class of each lane begins: class by class, in it lane by lane."""
    flat = counts.T.reshape(-1)
    starts: NDArray[np.int64] = np.ascontiguousarray(
        (np.cumsum(flat) - flat).reshape(counts.T.shape).T
    )
    return starts


def _rice(gaps: NDArray[np.uint32]) -> int:
    """The parameter whose unary parts are short and whose low parts are nearly uniform."""
    return min(_MOST_RICE, max(0, int(float(gaps.mean()) * 0.7).bit_length() - 1))


def _table(
    table: memoryview, present: int, lanes: int, kind: WeightClass
) -> tuple[list[int], list[int], NDArray[np.int64]]:
    counts = np.zeros((kernels.LANES, kernels.CLASSES), np.int64)
    numbers: list[int] = []
    rice: list[int] = []
    size = _CLASS.size + lanes * _COUNT.itemsize
    for at in range(0, present * size, size):
        number, k = _CLASS.unpack_from(table, at)
        if number > kind.mask or k > _MOST_RICE or (numbers and number <= numbers[-1]):
            raise ChunkFormatError("compact chunk lists a class that cannot be")
        numbers.append(number)
        rice.append(k)
        counts[:lanes, number] = np.frombuffer(table, _COUNT, lanes, at + _CLASS.size)
    return numbers, rice, counts

"""Changes by class of the old weight: where the receiver knows how likely a change is.

A weight w flips in a step with probability about |Δw| / ulp(w), and ulp(w) depends on its exponent
alone. So changed weights are counted among those of equal exponent: `rank gap` is the number of
unchanged weights of the class between one changed weight and the next. A range is cut in lanes of
equal length, each with ranks of its own, since following one class's counter after another is
what decoding waits for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.jit import compiled
from weight_transfer.kernels.ranges import Bytes, Contexts, Ints, get, put

Bits = NDArray[np.unsignedinteger[Any]]
CLASSES = 256
LANES = 4
# Contexts of one class: unary part of a gap, length of a change, its second bit.
_GAPS, _LENGTHS, _SECONDS = 0, 8, 32
CONTEXTS = 40
_MOST_LENGTH_CONTEXT, _MOST_SECOND_CONTEXT = 23, 7
_NONE = np.int32(0x7FFFFFFF)
WRONG = -1


@compiled
def class_counts(
    old: Bits, gaps: NDArray[np.uint32], shift: int, mask: int, lane_size: int, counts: Ints
) -> None:
    """Count the changed weights into `counts` [lanes, CLASSES]."""
    index = -1
    for k in range(gaps.size):
        index += np.int64(gaps[k]) + 1
        kind = (np.uint64(old[index]) >> np.uint64(shift)) & np.uint64(mask)
        counts[index // lane_size, np.int64(kind)] += 1


@compiled
def by_class(
    old: Bits,
    gaps: NDArray[np.uint32],
    codes: Bits,
    shift: int,
    mask: int,
    lane_size: int,
    starts: Ints,
    rank_gaps: NDArray[np.uint32],
    sorted_codes: Bits,
) -> None:
    """Sort changes by lane and class; `starts` [lanes, CLASSES]: where each begins (used up).

    Four histograms take turns: one alone would wait for its own last write.
    """
    up, ones = np.uint64(shift), np.uint64(mask)
    seen = np.zeros((4, CLASSES), np.int32)
    following = np.zeros(CLASSES, np.int64)
    lane, at, index = 0, 0, -1
    for k in range(gaps.size):
        index += np.int64(gaps[k]) + 1
        while index >= (lane + 1) * lane_size:
            lane += 1
            at = lane * lane_size
            seen[:] = 0
            following[:] = 0
        while at + 4 <= index:
            seen[0, np.int64((np.uint64(old[at]) >> up) & ones)] += 1
            seen[1, np.int64((np.uint64(old[at + 1]) >> up) & ones)] += 1
            seen[2, np.int64((np.uint64(old[at + 2]) >> up) & ones)] += 1
            seen[3, np.int64((np.uint64(old[at + 3]) >> up) & ones)] += 1
            at += 4
        while at < index:
            seen[0, np.int64((np.uint64(old[at]) >> up) & ones)] += 1
            at += 1
        kind = np.int64((np.uint64(old[index]) >> up) & ones)
        rank = (
            np.int64(seen[0, kind])
            + np.int64(seen[1, kind])
            + np.int64(seen[2, kind])
            + np.int64(seen[3, kind])
        )
        slot = starts[lane, kind]
        rank_gaps[slot] = rank - following[kind]
        sorted_codes[slot] = codes[k]
        starts[lane, kind] = slot + 1
        following[kind] = rank + 1


@compiled
def size_of(rank_gaps: NDArray[np.uint32], codes: Bits, k: int) -> tuple[int, int]:
    """(decisions, raw bits) that coding these with Rice parameter `k` takes."""
    decisions, raw = 0, 0
    for at in range(rank_gaps.size):
        length = _length(np.uint64(codes[at]))
        decisions += (np.int64(rank_gaps[at]) >> k) + 1 + length + 1
        raw += k + 1 + max(0, length - 2)
    return decisions, raw


@compiled
def encode_class(
    rank_gaps: NDArray[np.uint32],
    codes: Bits,
    k: int,
    state: Ints,
    coded: Bytes,
    bits: Ints,
    raw: Bytes,
    odds: Contexts,
    seen: Bytes,
) -> None:
    """Append one lane of one class; `odds`, `seen`: its contexts."""
    one = np.uint64(1)
    for at in range(rank_gaps.size):
        gap = np.int64(rank_gaps[at])
        unary = gap >> k
        for step in range(unary):
            put(state, coded, odds, seen, _GAPS + min(step, 7), 1)
        put(state, coded, odds, seen, _GAPS + min(unary, 7), 0)
        _put_raw(bits, raw, gap & ((1 << k) - 1), k)
        code = np.uint64(codes[at])
        size = (code >> one) + (code & one)
        _put_raw(bits, raw, np.int64(code & one), 1)
        length = _length(code)
        most = 8 * codes.itemsize
        for step in range(1, length):
            put(state, coded, odds, seen, _LENGTHS + min(step - 1, _MOST_LENGTH_CONTEXT), 1)
        if length < most:
            put(state, coded, odds, seen, _LENGTHS + min(length - 1, _MOST_LENGTH_CONTEXT), 0)
        if length > 1:
            second = np.int64((size >> np.uint64(length - 2)) & one)
            put(state, coded, odds, seen, _SECONDS + min(length - 2, _MOST_SECOND_CONTEXT), second)
            rest = length - 2
            while rest > 0:
                part = min(rest, 32)
                rest -= part
                piece = (size >> np.uint64(rest)) & ((one << np.uint64(part)) - one)
                _put_raw(bits, raw, np.int64(piece), part)


@compiled
def decode_class(
    rank_gaps: NDArray[np.uint32],
    codes: Bits,
    k: int,
    most_gap: int,
    state: Ints,
    coded: Bytes,
    bits: Ints,
    raw: Bytes,
    odds: Contexts,
    seen: Bytes,
) -> int:
    """Fill one lane of one class; WRONG for what no encoder writes."""
    one = np.uint64(1)
    most = 8 * codes.itemsize
    for at in range(rank_gaps.size):
        unary = 0
        while get(state, coded, odds, seen, _GAPS + min(unary, 7)):
            unary += 1
            if unary << k > most_gap:
                return WRONG
        gap = (unary << k) | _get_raw(bits, raw, k)
        if gap > most_gap:
            return WRONG
        rank_gaps[at] = gap
        negative = np.uint64(_get_raw(bits, raw, 1))
        length = 1
        while length < most and get(
            state, coded, odds, seen, _LENGTHS + min(length - 1, _MOST_LENGTH_CONTEXT)
        ):
            length += 1
        size = one
        if length > 1:
            second = get(state, coded, odds, seen, _SECONDS + min(length - 2, _MOST_SECOND_CONTEXT))
            size = (size << one) | np.uint64(second)
            rest = length - 2
            while rest > 0:
                part = min(rest, 32)
                rest -= part
                size = (size << np.uint64(part)) | np.uint64(_get_raw(bits, raw, part))
        codes[at] = (size << one) - negative
        if np.uint64(codes[at]) == np.uint64(0):
            return WRONG
    return 0


@compiled
def finish_raw(bits: Ints, raw: Bytes) -> int:
    """Write the last bits; returns the number of bytes."""
    while bits[1] > 0:
        raw[bits[2]] = bits[0] & 0xFF
        bits[0] >>= 8
        bits[1] -= 8
        bits[2] += 1
    return bits[2]


@compiled
def place(
    old: Bits,
    shift: int,
    mask: int,
    lane_size: int,
    rank_gaps: NDArray[np.uint32],
    codes: Bits,
    starts: Ints,
    counts: Ints,
    firsts: Ints,
    indices: NDArray[np.int64],
    values: Bits,
) -> int:
    """Walk all lanes at once and write (index, new value) of each change, ascending.

    `starts`, `counts` [LANES, CLASSES]: each class's part of `rank_gaps` and `codes`, in each lane
    (starts are used up); `firsts` [LANES]: where each lane's part of the result begins (used up).
    WRONG when a change lies behind its lane's end.
    """
    up, ones = np.uint64(shift), np.uint64(mask)
    left = np.full((LANES, CLASSES), _NONE, np.int32)
    for lane in range(LANES):
        for kind in range(CLASSES):
            if counts[lane, kind]:
                left[lane, kind] = np.int32(rank_gaps[starts[lane, kind]])
    whole = max(0, old.size - (LANES - 1) * lane_size)
    for at in range(whole):
        for lane in range(LANES):
            index = lane * lane_size + at
            value = np.uint64(old[index])
            kind = np.int64((value >> up) & ones)
            waits = left[lane, kind] - np.int32(1)
            left[lane, kind] = waits
            if waits < 0:
                _change(
                    lane,
                    kind,
                    index,
                    value,
                    left,
                    rank_gaps,
                    codes,
                    starts,
                    counts,
                    firsts,
                    indices,
                    values,
                )
    for lane in range(LANES):
        for index in range(lane * lane_size + whole, min((lane + 1) * lane_size, old.size)):
            value = np.uint64(old[index])
            kind = np.int64((value >> up) & ones)
            waits = left[lane, kind] - np.int32(1)
            left[lane, kind] = waits
            if waits < 0:
                _change(
                    lane,
                    kind,
                    index,
                    value,
                    left,
                    rank_gaps,
                    codes,
                    starts,
                    counts,
                    firsts,
                    indices,
                    values,
                )
    return WRONG if counts.any() else 0


@compiled
def _change(
    lane: int,
    kind: int,
    index: int,
    value: np.uint64,
    left: NDArray[np.int32],
    rank_gaps: NDArray[np.uint32],
    codes: Bits,
    starts: Ints,
    counts: Ints,
    firsts: Ints,
    indices: NDArray[np.int64],
    values: Bits,
) -> None:
    one = np.uint64(1)
    slot = starts[lane, kind]
    code = np.uint64(codes[slot])
    delta = (code >> one) ^ (np.uint64(0) - (code & one))
    to = firsts[lane]
    firsts[lane] = to + 1
    indices[to] = index
    values[to] = value + delta
    starts[lane, kind] = slot + 1
    counts[lane, kind] -= 1
    if counts[lane, kind]:
        left[lane, kind] = np.int32(rank_gaps[slot + 1])
    else:
        left[lane, kind] = _NONE


@compiled
def _length(code: np.uint64) -> int:
    """Bits of the size of a change, at least 1."""
    one = np.uint64(1)
    size = (code >> one) + (code & one)
    length = 0
    while size:
        length += 1
        size >>= one
    return length


@compiled
def _put_raw(bits: Ints, raw: Bytes, value: int, count: int) -> None:
    held = bits[0] | (value << bits[1])
    n = bits[1] + count
    at = bits[2]
    while n >= 8:
        raw[at] = held & 0xFF
        held >>= 8
        n -= 8
        at += 1
    bits[0], bits[1], bits[2] = held, n, at


@compiled
def _get_raw(bits: Ints, raw: Bytes, count: int) -> int:
    """Beyond the end there are zeros."""
    held, n, at = bits[0], bits[1], bits[2]
    while n < count:
        byte = np.int64(raw[at]) if at < raw.size else np.int64(0)
        held |= byte << n
        n += 8
        at += 1
    bits[0], bits[1], bits[2] = held >> count, n - count, at
    return held & ((1 << count) - 1)

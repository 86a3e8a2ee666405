"""Coder of the `compact` encoding: changes sorted by the exponent of the old weight, range coded.

A weight w flips in a step with probability about |Δw| / ulp(w), and ulp(w) depends on its exponent
alone, which the receiver knows. So changed weights are counted among those of equal exponent, a
class: `rank gap` is the number of unchanged weights of the class between one changed weight and the
next. Ranks are counted MATCHED weights at a time: those of a class are the set bits of one word.

The range coder is binary and adaptive (after G. N. N. Martin, 1979; carries as in LZMA's). Of its
state, low (or code) and range are scalars, which stay in registers from decision to decision; the
rest is an i64 array: encoder [low, range, cache, cached, position], decoder [code, range,
position], with the scalars put back between calls. A context is a probability of 0 in 1/65536 and
how often it was asked, which sets how fast it learns: as the mean of its decisions at first, by
1/256 at last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.processor import CLASSES
from weight_transfer.kernels.simd import (
    AHEAD,
    MATCHED,
    compiled,
    leading_zeros,
    matching,
    ones,
    prefetch,
    trailing_zeros,
)

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Contexts = NDArray[np.uint16]
FLUSH_BYTES = 5
# A decision costs at most log2(65536 / LEAST) bits.
_LEAST = 48
WORST_BITS = 11
_TOP = 1 << 24
_HALF = 1 << 15
_SLOWEST = 255
_STEP = np.array([65536 / (n + 1.6) for n in range(_SLOWEST + 1)], np.int64)
# Contexts of one class: unary part of a gap, length of a change, its second bit.
_GAPS, _LENGTHS, _SECONDS = 0, 8, 32
CONTEXTS = 40
_MOST_LENGTH_CONTEXT, _MOST_SECOND_CONTEXT = 23, 7
_NEVER = 1 << 62
# Weights whose classes are worked out at once.
_STRETCH = 4096
WRONG = -1


def contexts(*shape: int) -> tuple[Contexts, Bytes]:
    """Return (probabilities of 0 in 1/65536, counts) of new contexts, arrays of this shape."""
    return np.full(shape, _HALF, np.uint16), np.zeros(shape, np.uint8)


def encoder() -> Ints:
    """Return the state of a range encoder before its first decision."""
    return np.array([0, 0xFFFFFFFF, 0, 1, 0], np.int64)


@compiled
def put(
    low: int,
    width: int,
    state: Ints,
    out: Bytes,
    odds: Contexts,
    seen: Bytes,
    at: int,
    bit: int,
) -> tuple[int, int]:
    """Encode a decision `bit` in context `at` of flat `odds` and `seen`.

    Return the new (low, range).
    """
    p = np.int64(odds[at])
    bound = (width >> 16) * p
    n = np.int64(seen[at])
    if bit:
        low += bound
        width -= bound
        p -= (p * _STEP[n]) >> 16
    else:
        width = bound
        p += ((65536 - p) * _STEP[n]) >> 16
    odds[at] = min(max(p, _LEAST), 65536 - _LEAST)
    seen[at] = min(n + 1, _SLOWEST)
    while width < _TOP:
        width <<= 8
        low = _shift_low(state, out, low)
    return low, width


@compiled
def flush(state: Ints, out: Bytes) -> int:
    """Write the encoder's last bytes to `out`; return the number of bytes in `out`."""
    low = state[0]
    for _ in range(FLUSH_BYTES):
        low = _shift_low(state, out, low)
    return state[4]


@compiled
def _shift_low(state: Ints, out: Bytes, low: int) -> int:
    if low < 0xFF000000 or low > 0xFFFFFFFF:
        carry = low >> 32
        position = state[4]
        out[position] = (state[2] + carry) & 0xFF
        position += 1
        for _ in range(state[3] - 1):
            out[position] = (0xFF + carry) & 0xFF
            position += 1
        state[4] = position
        state[3] = 0
        state[2] = (low >> 24) & 0xFF
    state[3] += 1
    return (low & 0x00FFFFFF) << 8


@compiled
def begin(state: Ints, raw: Bytes) -> None:
    """Initialise a decoder's state from the first bytes of `raw`.

    Bytes beyond its end count as zeros.
    """
    state[0], state[1], state[2] = 0, 0xFFFFFFFF, 0
    for _ in range(FLUSH_BYTES):
        state[0] = ((state[0] << 8) | _next(state, raw)) & 0xFFFFFFFF


@compiled
def get(
    code: int, width: int, state: Ints, raw: Bytes, odds: Contexts, seen: Bytes, at: int
) -> tuple[int, int, int]:
    """Decode a decision in context `at` of flat `odds` and `seen`.

    Return (bit, new code, new range).
    """
    p = np.int64(odds[at])
    bound = (width >> 16) * p
    n = np.int64(seen[at])
    bit = np.int64(code >= bound)
    if bit:
        code -= bound
        width -= bound
        p -= (p * _STEP[n]) >> 16
    else:
        width = bound
        p += ((65536 - p) * _STEP[n]) >> 16
    odds[at] = min(max(p, _LEAST), 65536 - _LEAST)
    seen[at] = min(n + 1, _SLOWEST)
    while width < _TOP:
        width <<= 8
        code = (code << 8) | _next(state, raw)
    return bit, code, width


@compiled
def _next(state: Ints, raw: Bytes) -> int:
    position = state[2]
    state[2] = position + 1
    return np.int64(raw[position]) if position < raw.size else np.int64(0)


Bits = NDArray[np.unsignedinteger[Any]]


@compiled
def class_counts(old: Bits, gaps: NDArray[np.uint32], shift: int, mask: int, counts: Ints) -> None:
    """Add to `counts` i64[CLASSES] the number of changed weights in each magnitude class."""
    up, low = np.uint64(shift), np.uint64(mask)
    ahead = -1
    for k in range(min(AHEAD, gaps.size)):
        ahead += np.int64(gaps[k]) + 1
    index = -1
    for k in range(gaps.size):
        if k + AHEAD < gaps.size:
            ahead += np.int64(gaps[k + AHEAD]) + 1
        prefetch(old, ahead)
        index += np.int64(gaps[k]) + 1
        counts[(np.uint64(old[index]) >> up) & low] += 1


@compiled
def by_class(
    old: Bits,
    gaps: NDArray[np.uint32],
    codes: Bits,
    shift: int,
    mask: int,
    ends: Bytes,
    present: Bytes,
    starts: Ints,
    rank_gaps: NDArray[np.uint32],
    sorted_codes: Bits,
) -> None:
    """Sort changes by class, into `rank_gaps` and `sorted_codes`.

    `starts` [present.size]: position where each class begins; it is advanced to the end of the
    class. `ends`: see `_classes_of`.
    """
    kinds = np.empty(_STRETCH, np.uint8)
    number = np.zeros(CLASSES, np.int64)
    for j in range(present.size):
        number[present[j]] = j
    # Weights of each class before the word at hand, and up to its last change.
    before = np.zeros(present.size, np.int64)
    following = np.zeros(present.size, np.int64)
    k = 0
    index = np.int64(gaps[0])
    for first in range(0, old.size, _STRETCH):
        stretch = old[first : first + _STRETCH]
        _classes_of(stretch, shift, mask, ends, kinds)
        for at in range(0, stretch.size, MATCHED):
            while index < first + at + MATCHED:
                place = index - first - at
                kind = kinds[at + place]
                lower = matching(kinds, at, kind) & (
                    (np.uint64(1) << np.uint64(place)) - np.uint64(1)
                )
                j = number[kind]
                rank = before[j] + ones(lower)
                slot = starts[j]
                rank_gaps[slot] = rank - following[j]
                sorted_codes[slot] = codes[k]
                starts[j] = slot + 1
                following[j] = rank + 1
                k += 1
                if k == gaps.size:
                    return
                index += np.int64(gaps[k]) + 1
            for j in range(present.size):
                before[j] += ones(matching(kinds, at, present[j]))


@compiled
def _classes_of(weights: Bits, shift: int, mask: int, ends: Bytes, kinds: Bytes) -> None:
    """Write the class of each weight to `kinds`, with the outer classes merged.

    `ends` (lowest, first, last, highest): classes from lowest to first become first, those from
    last to highest become last.
    """
    lowest, first, last, highest = ends[0], ends[1], ends[2], ends[3]
    for k in range(weights.size):
        kind = np.uint8((weights[k] >> shift) & mask)
        raised = max(kind, first) if kind >= lowest else kind
        kinds[k] = min(raised, last) if kind <= highest else kind


@compiled
def size_of(rank_gaps: NDArray[np.uint32], codes: Bits, k: int) -> tuple[int, int]:
    """Return (coded decisions, raw bits) that one class of changes takes with Rice parameter
    `k`."""
    decisions, raw = 0, 0
    for at in range(rank_gaps.size):
        code = np.uint64(codes[at])
        length = _length((code >> np.uint64(1)) + (code & np.uint64(1)))
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
    """Append the changes of one class to `coded` and `raw`.

    `k`: Rice parameter. `odds`, `seen`: the class's contexts, updated.
    """
    one = np.uint64(1)
    most = 8 * codes.itemsize
    low, width = state[0], state[1]
    for at in range(rank_gaps.size):
        gap = np.int64(rank_gaps[at])
        unary = gap >> k
        for step in range(unary):
            low, width = put(low, width, state, coded, odds, seen, _GAPS + min(step, 7), 1)
        low, width = put(low, width, state, coded, odds, seen, _GAPS + min(unary, 7), 0)
        code = np.uint64(codes[at])
        size = (code >> one) + (code & one)
        _put_raw(bits, raw, gap & ((1 << k) - 1) | (np.int64(code & one) << k), k + 1)
        length = _length(size)
        for step in range(length - 1):
            place = _LENGTHS + min(step, _MOST_LENGTH_CONTEXT)
            low, width = put(low, width, state, coded, odds, seen, place, 1)
        if length < most:
            place = _LENGTHS + min(length - 1, _MOST_LENGTH_CONTEXT)
            low, width = put(low, width, state, coded, odds, seen, place, 0)
        if length > 1:
            second = np.int64((size >> np.uint64(length - 2)) & one)
            place = _SECONDS + min(length - 2, _MOST_SECOND_CONTEXT)
            low, width = put(low, width, state, coded, odds, seen, place, second)
            _put_rest(bits, raw, size, length - 2)
    state[0], state[1] = low, width


@compiled
def _put_rest(bits: Ints, raw: Bytes, size: np.uint64, rest: int) -> None:
    while rest > 0:
        part = min(rest, 32)
        rest -= part
        piece = (size >> np.uint64(rest)) & ((np.uint64(1) << np.uint64(part)) - np.uint64(1))
        _put_raw(bits, raw, np.int64(piece), part)


@compiled
def decode_class(
    rank_gaps: NDArray[np.uint32],
    codes: Bits,
    k: int,
    left: int,
    state: Ints,
    coded: Bytes,
    bits: Ints,
    raw: Bytes,
    odds: Contexts,
    seen: Bytes,
) -> int:
    """Decode one class into `rank_gaps` and `codes`.

    Return the new `left`, WRONG for impossible input. `left`: number of weights that no change of
    an earlier class has passed over. Gaps and changes of all classes together are no more than the
    weights, which bounds the work.
    """
    one = np.uint64(1)
    most = 8 * codes.itemsize
    code, width = state[0], state[1]
    for at in range(rank_gaps.size):
        unary = 0
        bit, code, width = get(code, width, state, coded, odds, seen, _GAPS)
        while bit and unary << k < left:
            unary += 1
            bit, code, width = get(code, width, state, coded, odds, seen, _GAPS + min(unary, 7))
        low = _get_raw(bits, raw, k + 1)
        gap = (unary << k) | (low & ((1 << k) - 1))
        rank_gaps[at] = gap
        negative = np.uint64(low >> k)
        length = 1
        bit = np.int64(1)
        while length < most and bit:
            place = _LENGTHS + min(length - 1, _MOST_LENGTH_CONTEXT)
            bit, code, width = get(code, width, state, coded, odds, seen, place)
            length += bit
        size = one
        if length > 1:
            place = _SECONDS + min(length - 2, _MOST_SECOND_CONTEXT)
            bit, code, width = get(code, width, state, coded, odds, seen, place)
            size = (size << one) | np.uint64(bit)
            size = _get_rest(bits, raw, size, length - 2)
        codes[at] = (size << one) - negative
        left -= gap + 1
        if left < 0 or np.uint64(codes[at]) == np.uint64(0):
            return WRONG
    state[0], state[1] = code, width
    return left


@compiled
def _get_rest(bits: Ints, raw: Bytes, size: np.uint64, rest: int) -> np.uint64:
    while rest > 0:
        part = min(rest, 32)
        rest -= part
        size = (size << np.uint64(part)) | np.uint64(_get_raw(bits, raw, part))
    return size


@compiled
def finish_raw(bits: Ints, raw: Bytes) -> int:
    """Write the last bits to `raw`; return the number of bytes in `raw`."""
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
    ends: Bytes,
    present: Bytes,
    rank_gaps: NDArray[np.uint32],
    codes: Bits,
    starts: Ints,
    counts: Ints,
    indices: NDArray[np.int64],
    replaced: Bits,
    values: Bits,
) -> int:
    """Write index, old and new value of each change to `indices`, `replaced` and `values`.

    Indices ascend. Return 0, or WRONG when a change lies behind the last weight. `starts`,
    `counts` [present.size]: each class's part of `rank_gaps` and `codes`; both are used up.
    """
    one = np.uint64(1)
    kinds = np.zeros(_STRETCH, np.uint8)
    slots = np.empty(MATCHED, np.int64)
    # Weights of each class from the word at hand on that come before its next change.
    due = np.full(present.size, _NEVER, np.int64)
    for j in range(present.size):
        if counts[j]:
            due[j] = rank_gaps[starts[j]]
    found = 0
    for first in range(0, old.size, _STRETCH):
        stretch = old[first : first + _STRETCH]
        _classes_of(stretch, shift, mask, ends, kinds)
        for at in range(0, stretch.size, MATCHED):
            hits = np.uint64(0)
            for j in range(present.size):
                word = matching(kinds, at, present[j])
                size = ones(word)
                while due[j] < size:
                    bit = _nth(word, due[j])
                    hits |= one << np.uint64(bit)
                    slots[bit] = starts[j]
                    _advance(j, rank_gaps, starts, counts, due)
                due[j] -= size
            while hits != np.uint64(0):
                bit = trailing_zeros(hits)
                hits &= hits - one
                index = first + at + bit
                if index >= old.size:
                    return WRONG
                code = np.uint64(codes[slots[bit]])
                indices[found] = index
                replaced[found] = old[index]
                values[found] = np.uint64(replaced[found]) + (
                    (code >> one) ^ (np.uint64(0) - (code & one))
                )
                found += 1
    return WRONG if counts.any() else 0


@compiled
def _advance(j: int, rank_gaps: NDArray[np.uint32], starts: Ints, counts: Ints, due: Ints) -> None:
    starts[j] += 1
    counts[j] -= 1
    if counts[j]:
        due[j] += 1 + np.int64(rank_gaps[starts[j]])
    else:
        due[j] = _NEVER


@compiled
def _nth(word: np.uint64, n: int) -> int:
    """Return the number of the set bit of `word` that has `n` set bits below it, without a
    branch."""
    bit = 0
    for half in (32, 16, 8, 4, 2, 1):
        low = ones(word & ((np.uint64(1) << np.uint64(half)) - np.uint64(1)))
        upper = np.int64(n >= low)
        n -= low * upper
        word >>= np.uint64(half * upper)
        bit += half * upper
    return bit


@compiled
def _length(size: np.uint64) -> int:
    """Return the number of bits of the size of a change, which is not 0."""
    return 64 - leading_zeros(size)


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
    """Return the next `count` raw bits; bytes beyond the end of `raw` count as zeros."""
    held, n, at = bits[0], bits[1], bits[2]
    while n < count:
        byte = np.int64(raw[at]) if at < raw.size else np.int64(0)
        held |= byte << n
        n += 8
        at += 1
    bits[0], bits[1], bits[2] = held >> count, n - count, at
    return held & ((1 << count) - 1)

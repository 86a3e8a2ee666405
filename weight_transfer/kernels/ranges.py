"""Adaptive binary range coder (after G. N. N. Martin, 1979; carries as in LZMA's).

Of a state, low (or code) and range are scalars, which stay in registers from decision to decision;
the rest is an i64 array: encoder [low, range, cache, cached, position], decoder [code, range,
position], with the scalars put back between calls.
A context is a probability of 0 in 1/65536 and how often it was asked, which says how
fast it learns: as the mean of what was seen at first, by 1/256 at last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.jit import compiled

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


def contexts(*shape: int) -> tuple[Contexts, Bytes]:
    """Probabilities and counts of contexts that have seen nothing."""
    return np.full(shape, _HALF, np.uint16), np.zeros(shape, np.uint8)


def encoder() -> Ints:
    """The state before the first decision."""
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
    """Encode a decision in context `at` of flat `odds` and `seen`; returns (low, range)."""
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
    """Write what is left; returns the number of bytes."""
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
    """Read the first bytes into a decoder's state. Beyond the end there are zeros."""
    state[0], state[1], state[2] = 0, 0xFFFFFFFF, 0
    for _ in range(FLUSH_BYTES):
        state[0] = ((state[0] << 8) | _next(state, raw)) & 0xFFFFFFFF


@compiled
def get(
    code: int, width: int, state: Ints, raw: Bytes, odds: Contexts, seen: Bytes, at: int
) -> tuple[int, int, int]:
    """Decode a decision; returns (it, code, range)."""
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

"""Codec of one row range: (old bits, new bits) → payload → (indices, absolute new bits).

empty   nothing changed                 payload: nothing
sparse  index gaps + ulp deltas         payload: gap plane count u8 | gap planes | delta planes
bitmap  changed map + ulp deltas        payload: bitmap plane | delta planes
dense   new bits                        payload: value planes
A gap is the distance to the previous changed index, less one. An ulp delta is new − old of the
integer views, wrapped to the element's width, zigzag coded: exact for every bit pattern.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import ChunkFormatError
from weight_transfer.planes import PlaneReader, pack_plane, pack_planes, planes_needed
from weight_transfer.tensors import Bits

_BITMAP_DENSITY = 0.02
"""Below this changed share the gaps always win, so the other encodings are not even tried."""


class Encoding(IntEnum):
    """How a chunk's payload is written."""

    EMPTY = 0
    SPARSE = 1
    BITMAP = 2
    DENSE = 3


def encode_payload(old: Bits, new: Bits) -> tuple[Encoding, int, bytes]:
    """Return (encoding, changed elements, payload), the smallest of the encodings."""
    indices = np.flatnonzero(old != new)
    if not indices.size:
        return Encoding.EMPTY, 0, b""
    deltas = _zigzag(new[indices] - old[indices])
    candidates = [(Encoding.SPARSE, _sparse(indices, deltas))]
    if indices.size > _BITMAP_DENSITY * old.size:
        bitmap = np.packbits(old != new, bitorder="little").tobytes()
        planes = pack_plane(bitmap) + pack_planes(deltas, deltas.itemsize)
        candidates.append((Encoding.BITMAP, planes))
        candidates.append((Encoding.DENSE, pack_planes(new, new.itemsize)))
    encoding, payload = min(candidates, key=lambda candidate: len(candidate[1]))
    return encoding, int(indices.size), payload


def decode_payload(
    encoding: Encoding, changed: int, payload: memoryview, old: Bits
) -> tuple[NDArray[np.int64], Bits]:
    """Return (changed indices within the range, their new bits), given the range's old bits.

    Raises ChunkFormatError for any payload that is not the one encoding of such a change.
    """
    if changed > old.size or (encoding is Encoding.EMPTY) != (changed == 0):
        raise ChunkFormatError(f"{changed} changes claimed by {encoding.name} of {old.size}")
    reader = PlaneReader(payload)
    if encoding is Encoding.EMPTY:
        indices, new = np.zeros(0, dtype=np.int64), old[:0]
    elif encoding is Encoding.DENSE:
        dense = reader.integers(old.size, old.itemsize, old.itemsize)
        indices = np.flatnonzero(dense != old)
        new = dense[indices]
    else:
        read = _read_gaps if encoding is Encoding.SPARSE else _read_bitmap
        indices = read(reader, changed, old.size)
        deltas = _unzigzag(reader.integers(changed, old.itemsize, old.itemsize))
        if not deltas.all():
            raise ChunkFormatError("a change of nothing is listed; fetch the chunk again")
        new = old[indices] + deltas
    reader.finish()
    if indices.size != changed:
        raise ChunkFormatError(f"{indices.size} changes found where {changed} were claimed")
    return indices, new


def _sparse(indices: NDArray[np.int64], deltas: Bits) -> bytes:
    gaps = np.diff(indices, prepend=-1).astype(np.uint64) - np.uint64(1)
    planes = planes_needed(gaps)
    return bytes([planes]) + pack_planes(gaps, planes) + pack_planes(deltas, deltas.itemsize)


def _read_gaps(reader: PlaneReader, changed: int, size: int) -> NDArray[np.int64]:
    planes = reader.byte()
    if not 1 <= planes <= 8:
        raise ChunkFormatError(f"{planes} gap planes; 1 to 8 are possible")
    gaps = reader.integers(changed, planes, 8)
    # Any single gap beyond the range is wrong, and without one the sum cannot wrap.
    if int(gaps.max()) >= size:
        raise ChunkFormatError("a changed index lies outside the chunk's rows")
    indices: NDArray[np.int64] = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if int(indices[-1]) >= size:
        raise ChunkFormatError("a changed index lies outside the chunk's rows")
    return indices


def _read_bitmap(reader: PlaneReader, changed: int, size: int) -> NDArray[np.int64]:
    bitmap = np.unpackbits(reader.plane((size + 7) // 8), bitorder="little")
    indices = np.flatnonzero(bitmap)
    if indices.size != changed or int(indices[-1]) >= size:
        raise ChunkFormatError(f"bitmap marks {indices.size} changes where {changed} were claimed")
    return indices


def _signed(width: int) -> np.dtype[np.signedinteger[Any]]:
    return np.dtype(f"<i{width}")


def _zigzag(deltas: Bits) -> Bits:
    signed = deltas.view(_signed(deltas.itemsize))
    zigzag: Bits = ((signed << 1) ^ (signed >> (8 * deltas.itemsize - 1))).view(deltas.dtype)
    return zigzag


def _unzigzag(codes: Bits) -> Bits:
    one = codes.dtype.type(1)
    deltas: Bits = (codes >> one) ^ (~(codes & one) + one)
    return deltas

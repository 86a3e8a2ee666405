"""Codec of one row range: (old bits, new bits) → payload → (indices, absolute new bits).

empty    nothing changed                 payload: nothing
sparse   index gaps + ulp deltas         payload: gap plane count u8 | gap planes | delta planes
bitmap   changed map + ulp deltas        payload: bitmap plane | delta planes
dense    new bits                        payload: value planes
compact  changes by class of old weight  payload: see `compact`
A gap is the distance to the previous changed index, less one. An ulp delta is new − old of the
integer views, wrapped to the element's width, zigzag coded: exact for every bit pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from weight_transfer.compact import decode_compact, encode_compact
from weight_transfer.crowded import encode_crowded
from weight_transfer.errors import ChunkFormatError
from weight_transfer.kernels.changes import Changes, apply_changes, gaps_of
from weight_transfer.kernels.difference import Difference
from weight_transfer.kernels.processor import Flat, processor_of
from weight_transfer.planes import Part, PlaneReader, pack_planes, planes_needed
from weight_transfer.tensors import Bits, WeightClass

_SPARSE_SHARE = 4
"""One in so many weights may change before a bitmap, which no gap can beat then, is tried."""
_SURELY_COMPACT = 4096
_GAP_BYTES = 4


class Encoding(IntEnum):
    """How a chunk's payload is written."""

    EMPTY = 0
    SPARSE = 1
    BITMAP = 2
    DENSE = 3
    COMPACT = 4


class Level(StrEnum):
    """What a publisher spends on a sparse chunk: little time, or few bytes."""

    FAST = "fast"
    COMPACT = "compact"


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded range. `digest_change`: what its tensor's digest grows by, mod MODULUS."""

    encoding: Encoding
    changed: int
    parts: tuple[Part, ...]
    digest_change: int

    @property
    def size(self) -> int:
        """Bytes of the payload, which is all parts joined."""
        return sum(len(part) for part in self.parts)


def encode_payload(
    old: Flat, new: Flat, kind: WeightClass, level: Level = Level.FAST, first: int = 0
) -> Encoded:
    """Encode a range whose first weight has index `first` in its tensor, the smallest way."""
    found = processor_of(old, new).compare(old, new, old.size // _SPARSE_SHARE, first)
    if found is None:
        return _crowded(old, new, first)
    if not found.count:
        return Encoded(Encoding.EMPTY, 0, (), 0)
    compact = encode_compact(found, kind) if level is Level.COMPACT else None
    # Beyond a few changes the table of classes costs nothing any more.
    if compact is not None and found.count > _SURELY_COMPACT:
        return Encoded(Encoding.COMPACT, found.count, (compact,), found.growth)
    sparse = Encoded(Encoding.SPARSE, found.count, tuple(_sparse(found)), found.growth)
    if compact is not None and len(compact) < sparse.size:
        return Encoded(Encoding.COMPACT, found.count, (compact,), found.growth)
    return sparse if sparse.size <= old.nbytes else _crowded(old, new, first)


def decode_payload(
    encoding: Encoding, changed: int, payload: memoryview, old: Bits
) -> tuple[NDArray[np.int64], Bits]:
    """Return (changed indices within the range, their new bits), given the range's old bits.

    Raises ChunkFormatError for any payload that is not the one encoding of such a change.
    """
    if changed > old.size or (encoding is Encoding.EMPTY) != (changed == 0):
        raise ChunkFormatError(f"{changed} changes claimed by {encoding.name} of {old.size}")
    if encoding is Encoding.COMPACT:
        return decode_compact(payload, changed, old)
    reader = PlaneReader(payload)
    if encoding is Encoding.EMPTY:
        indices, new = np.zeros(0, dtype=np.int64), old[:0]
    elif encoding is Encoding.DENSE:
        dense = decode_dense(changed, payload, old)
        if changed == old.size:
            return np.arange(changed, dtype=np.int64), dense
        indices = np.flatnonzero(dense != old)
        return indices, dense[indices]
    else:
        read = _read_gaps if encoding is Encoding.SPARSE else _read_bitmap
        gaps = read(reader, changed, old.size)
        codes = reader.integers(changed, old.itemsize, old.dtype)
        try:
            indices, new = apply_changes(old, Changes(gaps, codes))
        except ValueError as error:
            raise ChunkFormatError(f"{error}; fetch the chunk again") from error
    reader.finish()
    if indices.size != changed:
        raise ChunkFormatError(f"{indices.size} changes found where {changed} were claimed")
    return indices, new


def decode_dense(changed: int, payload: memoryview, old: Bits) -> Bits:
    """Return all new bits of a dense payload. Raises ChunkFormatError."""
    reader = PlaneReader(payload)
    dense: Bits = reader.integers(old.size, old.itemsize, old.dtype)
    reader.finish()
    found = np.count_nonzero(dense != old)
    if found != changed:
        raise ChunkFormatError(f"{found} changes found where {changed} were claimed")
    return dense


def _sparse(changes: Difference) -> list[Part]:
    planes = planes_needed(changes.gaps)
    codes = pack_planes(changes.codes, changes.codes.itemsize)
    return [bytes([planes]), *pack_planes(changes.gaps, planes), *codes]


def _crowded(old: Flat, new: Flat, first: int) -> Encoded:
    made = encode_crowded(old, new, first)
    encoding = Encoding.BITMAP if made.mapped else Encoding.DENSE
    return Encoded(encoding, made.changed, tuple(made.parts), made.growth)


def _read_gaps(reader: PlaneReader, changed: int, size: int) -> NDArray[np.uint32]:
    planes = reader.byte()
    if not 1 <= planes <= _GAP_BYTES:
        raise ChunkFormatError(f"{planes} gap planes; 1 to {_GAP_BYTES} are possible")
    gaps: NDArray[np.uint32] = reader.integers(changed, planes, np.dtype("<u4"))
    return gaps


def _read_bitmap(reader: PlaneReader, changed: int, size: int) -> NDArray[np.uint32]:
    gaps = gaps_of(reader.plane((size + 7) // 8), size, changed)
    if gaps is None:
        raise ChunkFormatError(f"bitmap does not mark the {changed} changes that were claimed")
    return gaps

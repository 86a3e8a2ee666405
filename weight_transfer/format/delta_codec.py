"""Codec of one row range of weights: (old bits, new bits) → payload → (indices, absolute new bits).

empty    nothing changed                 payload: nothing
sparse   index gaps + ulp deltas         payload: gap plane count u8 | gap planes | delta planes
bitmap   changed map + ulp deltas        payload: bitmap plane | delta planes
dense    new bits                        payload: value planes
compact  changes by class of old weight  payload: see `format/entropy.py`
compact4, compact6, compact32  the same, of weights of so many bits that share an element

A gap is the distance to the previous changed index, less one. An ulp delta is new − old of the
integer views, wrapped to the element's width, zigzag coded: exact for every bit pattern.

Byte planes are integers split by significance, each plane compressed on its own:
plane := tag u8 (0 raw, 1 zstd, 2 one byte, many times) | length u32 | bytes
A plane that zstd cannot shrink is stored raw, so nothing ever grows by more than its 5 bytes.

Of a crowded range many weights changed. A sample shows whether its bitmap or its dense form is
shorter, and a form longer than the weights themselves is never kept. Weights are read a stretch at
a time, and planes are made one after the other, so hardly more memory is held than the payload.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from weight_transfer.errors import ChunkFormatError
from weight_transfer.format.entropy import decode_compact, encode_compact, join, split
from weight_transfer.format.tensors import Bits, Flat, WeightClass
from weight_transfer.kernels.cpu import apply_changes, compare, gaps_of
from weight_transfer.kernels.processor import Change, Difference, processor_of
from weight_transfer.kernels.simd import all_equal, join_plane, split_plane

PLANE_HEADER = struct.Struct("<BI")
ZSTD_LEVEL = 1
_RAW, _ZSTD, _SAME = 0, 1, 2
Part: TypeAlias = bytes | memoryview
"""Part of a payload; parts are joined once, since a chunk may be as large as its weights."""
_STRETCH = 1 << 20
_SAMPLE = 1 << 16
_MODULUS = 1 << 64
_SPARSE_SHARE = 4
"""One weight of this many may change before a bitmap is tried: no sparse form is shorter then."""
_SURELY_COMPACT = 4096
_NIBBLES = WeightClass(1, 2, field=4)
"""Class of four bits: what integers hold is often weights of FP4 or INT4 in pairs."""
_GAP_BYTES = 4


def planes_needed(values: NDArray[np.unsignedinteger[Any]]) -> int:
    """Return the number of low bytes that hold every value, 1 at least."""
    top = int(values.max()) if values.size else 0
    return max(1, (top.bit_length() + 7) // 8)


def pack_planes(values: NDArray[np.unsignedinteger[Any]], count: int) -> list[Part]:
    """Return the low `count` bytes of `values` as compressed byte planes, least significant first.

    The parts are to be joined before `values` change.
    """
    return [part for plane in range(count) for part in _pack_plane_of(values, plane)]


def _pack_plane_of(values: NDArray[np.unsignedinteger[Any]], plane: int) -> list[Part]:
    same = all_equal(values, plane)
    if same >= 0 and values.size > 1:
        return [PLANE_HEADER.pack(_SAME, 1), bytes([same])]
    raw = np.empty(values.size, np.uint8)
    split_plane(values, plane, raw)
    return pack_plane(raw)


def pack_plane(raw: NDArray[np.uint8]) -> list[Part]:
    """Return header and body of one byte plane, compressed by zstd if that is shorter, else
    `raw` itself."""
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw.data)
    tag, body = (_ZSTD, packed) if len(packed) < raw.size else (_RAW, raw.data)
    return [PLANE_HEADER.pack(tag, len(body)), body]


class PlaneReader:
    """Reader of byte planes from an untrusted payload.

    It allocates only the sizes that callers expect.
    """

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def byte(self) -> int:
        return self._take(1)[0]

    def plane(self, size: int) -> NDArray[np.uint8]:
        """Return the next plane, decompressed.

        Raises ChunkFormatError unless it has `size` bytes.
        """
        tag, length = PLANE_HEADER.unpack(self._take(PLANE_HEADER.size))
        body = self._take(length)
        if tag == _RAW:
            raw = bytes(body)
        elif tag == _ZSTD:
            raw = _decompress(bytes(body), size)
        elif tag == _SAME and length == 1:
            return np.full(size, body[0], np.uint8)
        else:
            raise ChunkFormatError(f"unknown plane tag {tag}; fetch the chunk again")
        if len(raw) != size:
            raise ChunkFormatError(f"plane holds {len(raw)} bytes where {size} belong")
        return np.frombuffer(raw, dtype=np.uint8)

    def integers(self, size: int, planes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return `size` unsigned integers, whose low `planes` bytes are the next planes."""
        values = np.zeros(size, dtype)
        for plane in range(planes):
            join_plane(plane, self.plane(size), values)
        return values

    def finish(self) -> None:
        """Raise ChunkFormatError if bytes follow the last plane."""
        if self._at != len(self._payload):
            raise ChunkFormatError(f"{len(self._payload) - self._at} bytes after the last plane")

    def _take(self, length: int) -> memoryview:
        if length > len(self._payload) - self._at:
            raise ChunkFormatError("chunk ends in the middle of a plane; fetch it again")
        self._at += length
        return self._payload[self._at - length : self._at]


def _decompress(body: bytes, size: int) -> bytes:
    try:
        # The frame's own claim decides how much is allocated: check it first.
        if zstandard.frame_content_size(body) != size:
            raise ChunkFormatError(f"compressed plane does not claim the {size} bytes it must have")
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            body, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ChunkFormatError(f"compressed plane is damaged: {error}") from error


class Encoding(IntEnum):
    """Encoding of a chunk's payload, as its header numbers it."""

    EMPTY = 0
    SPARSE = 1
    BITMAP = 2
    DENSE = 3
    COMPACT = 4
    COMPACT4 = 5
    COMPACT6 = 6
    COMPACT32 = 7

    @property
    def field(self) -> int:
        """Bits of one weight in a compact payload, 0 where each element is one."""
        return {Encoding.COMPACT4: 4, Encoding.COMPACT6: 6, Encoding.COMPACT32: 32}.get(self, 0)


class Level(StrEnum):
    """Codec level of a sparse chunk: `fast` takes little time, `compact` few bytes."""

    FAST = "fast"
    COMPACT = "compact"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded range of weights, its payload in parts to be joined.

    `changed`: changed weights. `growth`: increase of the tensor's digest, mod 2^64.
    """

    encoding: Encoding
    changed: int
    parts: Sequence[Part]
    growth: int

    @property
    def size(self) -> int:
        """Bytes of the payload, all parts joined."""
        return sum(len(part) for part in self.parts)


def _crowded(old: Flat, new: Flat, first: int) -> Encoded:
    """Return a range with many changes encoded as a bitmap or dense, whichever is shorter.

    `first`: index of the range's first weight in its tensor.
    """
    if old.size <= _SAMPLE:
        return min(
            _mapped(old, new, first), _anew(old, new, first), key=lambda encoded: encoded.size
        )
    some = slice(0, _SAMPLE)
    sample = old[some], new[some], first
    ways = (_mapped, _anew) if _mapped(*sample).size <= _anew(*sample).size else (_anew, _mapped)
    encoded = ways[0](old, new, first)
    raw_bytes = old.nbytes + old.itemsize * PLANE_HEADER.size
    if encoded.size <= raw_bytes:
        return encoded
    del encoded
    return min((way(old, new, first) for way in (_anew, _mapped)), key=lambda each: each.size)


def _mapped(old: Flat, new: Flat, first: int) -> Encoded:
    """Return a range encoded as a bitmap of the changed weights and their deltas."""
    processor = processor_of(old, new)
    bitmap = np.empty((old.size + 7) // 8, np.uint8)
    # Only what is written to takes memory.
    planes: list[NDArray[np.uint8] | None] = [
        np.empty(old.size, np.uint8) for _ in range(old.itemsize)
    ]
    changed, growth = 0, 0
    for at in range(0, old.size, _STRETCH):
        part = slice(at, at + _STRETCH)
        marks = processor.mark(old[part], new[part], first + at)
        bitmap[at // 8 : at // 8 + marks.bitmap.size] = marks.bitmap
        end = changed + marks.codes.size
        for number, plane in enumerate(planes):
            assert plane is not None
            split_plane(marks.codes, number, plane[changed:end])
        changed, growth = end, growth + marks.growth
    parts = pack_plane(bitmap)
    for number in range(len(planes)):
        plane, planes[number] = planes[number], None
        assert plane is not None
        parts += pack_planes(plane[:changed], 1)
        del plane
    return Encoded(Encoding.BITMAP, changed, parts, growth % _MODULUS)


def _anew(old: Flat, new: Flat, first: int) -> Encoded:
    """Return a range encoded as all its new weights (dense)."""
    processor = processor_of(old, new)
    changed, growth = 0, 0
    for at in range(0, old.size, _STRETCH):
        part = slice(at, at + _STRETCH)
        marks = processor.mark(old[part], new[part], first + at)
        changed, growth = changed + marks.codes.size, growth + marks.growth
    parts = pack_planes(processor.read(new), new.itemsize)
    return Encoded(Encoding.DENSE, changed, parts, growth % _MODULUS)


def encode_payload(
    old: Flat, new: Flat, kind: WeightClass, level: Level = Level.FAST, first: int = 0
) -> Encoded:
    """Return the change of a range from `old` to `new` in its smallest encoding at this level.

    `first`: index of the range's first weight in its tensor. `kind`: class bits of its dtype.
    """
    difference = processor_of(old, new).compare(old, new, old.size // _SPARSE_SHARE, first)
    if difference is None:
        return _crowded(old, new, first)
    if not difference.count:
        return Encoded(Encoding.EMPTY, 0, (), 0)
    compact = _compact(difference, old, new, kind) if level is Level.COMPACT else None
    # Beyond a few changes the table of classes costs nothing any more.
    if compact is not None and difference.count > _SURELY_COMPACT:
        return compact
    sparse = Encoded(Encoding.SPARSE, difference.count, _sparse(difference), difference.growth)
    if compact is not None and compact.size < sparse.size:
        return compact
    return sparse if sparse.size <= old.nbytes else _crowded(old, new, first)


def _compact(difference: Difference, old: Flat, new: Flat, kind: WeightClass) -> Encoded:
    """Return the changes of a range encoded as `compact`, of whole elements or of the weights that
    share one, whichever is shorter."""
    growth, ways = difference.growth, list[Encoded]()
    if kind.field == 6 and old.nbytes % 3:
        kind = WeightClass(0, 0)
    if not kind.field:
        whole = encode_compact(difference, kind)
        ways.append(Encoded(Encoding.COMPACT, difference.count, [whole], growth))
    parts = kind if kind.bits else _NIBBLES
    if parts.field:
        processor = processor_of(old, new)
        before, after = (split(processor.read(bits), parts.field) for bits in (old, new))
        most = difference.count * max(2, 8 * old.itemsize // parts.field)
        changes = compare(before, after, most)
        assert changes is not None
        payload = encode_compact(changes, parts)
        ways.append(Encoded(Encoding[f"COMPACT{parts.field}"], changes.count, [payload], growth))
    return min(ways, key=lambda way: way.size)


def decode_payload(encoding: Encoding, changed: int, payload: memoryview, old: Bits) -> Change:
    """Return the change of a range's old bits, its indices ascending.

    Raises ChunkFormatError for any payload that is not the encoding of exactly `changed` changes.
    """
    if encoding.field and changed:
        return _decode_parts(encoding.field, changed, payload, old)
    if changed > old.size or (encoding is Encoding.EMPTY) != (changed == 0):
        raise ChunkFormatError(f"{changed} changes claimed by {encoding.name} of {old.size}")
    if encoding is Encoding.COMPACT:
        return decode_compact(payload, changed, old)
    reader = PlaneReader(payload)
    if encoding is Encoding.EMPTY:
        change = Change(np.zeros(0, dtype=np.int64), old[:0], old[:0])
    elif encoding is Encoding.DENSE:
        dense = decode_dense(changed, payload, old)
        if changed == old.size:
            return Change(np.arange(changed, dtype=np.int64), old.copy(), dense)
        indices = np.flatnonzero(dense != old)
        return Change(indices, old[indices], dense[indices])
    else:
        read = _read_gaps if encoding is Encoding.SPARSE else _read_bitmap
        gaps = read(reader, changed, old.size)
        codes = reader.integers(changed, old.itemsize, old.dtype)
        try:
            change = apply_changes(old, gaps, codes)
        except ValueError as error:
            raise ChunkFormatError(f"{error}; fetch the chunk again") from error
    reader.finish()
    if change.indices.size != changed:
        raise ChunkFormatError(f"{change.indices.size} changes found where {changed} were claimed")
    return change


def _decode_parts(field: int, changed: int, payload: memoryview, old: Bits) -> Change:
    """Return the change of elements that `changed` weights of `field` bits each share."""
    try:
        before = split(old, field)
        if changed > before.size:
            raise ChunkFormatError(f"{changed} changes claimed of {before.size} weights")
        part = decode_compact(payload, changed, before)
        after = before.copy()
        after[part.indices] = part.new
        new = join(after, field, old.dtype)
    except ValueError as error:
        raise ChunkFormatError(f"{error}; fetch the chunk again") from error
    indices = np.flatnonzero(new != old)
    return Change(indices, old[indices], new[indices])


def decode_dense(changed: int, payload: memoryview, old: Bits) -> Bits:
    """Return all new bits of a range from a dense payload.

    Raises ChunkFormatError unless exactly `changed` of them differ from `old`.
    """
    reader = PlaneReader(payload)
    dense: Bits = reader.integers(old.size, old.itemsize, old.dtype)
    reader.finish()
    count = np.count_nonzero(dense != old)
    if count != changed:
        raise ChunkFormatError(f"{count} changes found where {changed} were claimed")
    return dense


def _sparse(changes: Difference) -> list[Part]:
    planes = planes_needed(changes.gaps)
    codes = pack_planes(changes.codes, changes.codes.itemsize)
    return [bytes([planes]), *pack_planes(changes.gaps, planes), *codes]


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

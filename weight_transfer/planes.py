"""Byte planes: integers split by significance, each plane compressed on its own.

plane := tag u8 (0 raw, 1 zstd, 2 one byte, many times) | length u32 | bytes
A plane that zstd cannot shrink is stored raw, so nothing ever grows by more than its 5 bytes.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from weight_transfer.errors import ChunkFormatError
from weight_transfer.kernels.planes import all_equal, join_plane, split_plane

PLANE_HEADER = struct.Struct("<BI")
ZSTD_LEVEL = 1
_RAW, _ZSTD, _SAME = 0, 1, 2
Part: TypeAlias = bytes | memoryview
"""A piece of a payload: joined once, since a chunk may be as large as its weights."""


def planes_needed(values: NDArray[np.unsignedinteger[Any]]) -> int:
    """Return how many low bytes hold every value (at least 1)."""
    top = int(values.max()) if values.size else 0
    return max(1, (top.bit_length() + 7) // 8)


def pack_planes(values: NDArray[np.unsignedinteger[Any]], count: int) -> list[Part]:
    """Return the low `count` bytes of `values` as planes, least significant first, to be joined."""
    return [part for plane in range(count) for part in _pack_plane_of(values, plane)]


def _pack_plane_of(values: NDArray[np.unsignedinteger[Any]], plane: int) -> list[Part]:
    same = all_equal(values, plane)
    if same >= 0 and values.size > 1:
        return [PLANE_HEADER.pack(_SAME, 1), bytes([same])]
    raw = np.empty(values.size, np.uint8)
    split_plane(values, plane, raw)
    return pack_plane(raw)


def pack_plane(raw: NDArray[np.uint8]) -> list[Part]:
    """Return one plane, compressed where that helps; `raw` must not change until it is joined."""
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw.data)
    tag, body = (_ZSTD, packed) if len(packed) < raw.size else (_RAW, raw.data)
    return [PLANE_HEADER.pack(tag, len(body)), body]


class PlaneReader:
    """Reads planes of known sizes from untrusted bytes; raises ChunkFormatError, never grows."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def byte(self) -> int:
        """Read one byte."""
        return self._take(1)[0]

    def plane(self, size: int) -> NDArray[np.uint8]:
        """Read one plane that must hold exactly `size` bytes."""
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
        """Read `size` unsigned integers of which the low `planes` bytes are stored."""
        values = np.zeros(size, dtype)
        for plane in range(planes):
            join_plane(plane, self.plane(size), values)
        return values

    def finish(self) -> None:
        """Insist that nothing is left over."""
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

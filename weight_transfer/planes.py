"""Byte planes: integers split by significance, each plane compressed on its own.

plane := tag u8 (0 raw, 1 zstd) | length u32 | bytes
A plane that zstd cannot shrink is stored raw, so nothing ever grows by more than its 5 bytes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from weight_transfer.errors import ChunkFormatError
from weight_transfer.tensors import Bits, unsigned

PLANE_HEADER = struct.Struct("<BI")
ZSTD_LEVEL = 1
_RAW, _ZSTD = 0, 1


def planes_needed(values: NDArray[np.unsignedinteger[Any]]) -> int:
    """Return how many low bytes hold every value (at least 1)."""
    top = int(values.max()) if values.size else 0
    return max(1, (top.bit_length() + 7) // 8)


def pack_planes(values: NDArray[np.unsignedinteger[Any]], count: int) -> bytes:
    """Return the low `count` bytes of `values` as planes, least significant first."""
    split = np.ascontiguousarray(values).view(np.uint8).reshape(values.size, values.itemsize)
    return b"".join(pack_plane(split[:, plane].tobytes()) for plane in range(count))


def pack_plane(raw: bytes) -> bytes:
    """Return one plane, compressed where that helps."""
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)
    tag, body = (_ZSTD, packed) if len(packed) < len(raw) else (_RAW, raw)
    return PLANE_HEADER.pack(tag, len(body)) + body


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
        else:
            raise ChunkFormatError(f"unknown plane tag {tag}; fetch the chunk again")
        if len(raw) != size:
            raise ChunkFormatError(f"plane holds {len(raw)} bytes where {size} belong")
        return np.frombuffer(raw, dtype=np.uint8)

    def integers(self, size: int, planes: int, width: int) -> Bits:
        """Read `size` integers of `width` bytes whose low `planes` bytes are stored."""
        split = np.zeros((size, width), dtype=np.uint8)
        for plane in range(planes):
            split[:, plane] = self.plane(size)
        return split.reshape(-1).view(unsigned(width))

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

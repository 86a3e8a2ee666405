"""A delta file: all that turns one checkpoint on disk into another, byte for byte.

file    "ROSD" | format u8 | 3 zeros | blobs | index | tail
tail    index offset u64 | index bytes u64 | BLAKE3 of the index, 32 bytes | "ROSE"
index   JSON, compressed by zstd: how the new checkpoint's files look, its tensors as in a manifest,
        and where each blob lies
blob    a chunk of a tensor, or (compressed) the head of a file or a file that holds no tensors
Blobs are named by their BLAKE3. A tensor that the old checkpoint has not, or has in another shape
or type, is `fresh`: its chunks build on zeros.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Annotated, Final

import blake3
import msgspec
import zstandard
from msgspec import Meta, Struct

from weight_transfer.errors import DeltaFormatError, ManifestError
from weight_transfer.format.chunk import check_id
from weight_transfer.format.manifest import (
    MALFORMED,
    Count,
    Hex64,
    TensorUpdate,
    Word,
    check_tiling,
)

MAGIC: Final = b"ROSD\x02\0\0\0"
TAIL: Final = struct.Struct("<QQ32s4s")
_END: Final = b"ROSE"
FORMAT: Final = 2
_MAX_INDEX_BYTES: Final = 1 << 28
_Blob = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
_ZSTD_LEVEL: Final = 9


class DeltaFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Entry of a delta's index for one file of the new checkpoint, `size` bytes long.

    Just one is set: `head`, blob of a safetensors file's first bytes; `blob`, all of a file without
    tensors; `same`, BLAKE3 of a file that the old checkpoint has too, under the same path.
    """

    path: Annotated[str, Meta(max_length=4_096)]
    size: Count = 0
    head: _Blob = ""
    blob: _Blob = ""
    same: _Blob = ""


class _Format(Struct):
    format: int


class DeltaIndex(Struct, frozen=True, forbid_unknown_fields=True):
    """Index of a delta file: files and tensors of the new checkpoint.

    `fresh`: names, sorted, of tensors that build on zeros. `blobs`: (offset, length) by name.
    """

    format: int
    level: Word
    single: bool
    files: tuple[DeltaFile, ...]
    tensors: tuple[TensorUpdate, ...]
    fresh: tuple[str, ...]
    blobs: dict[Hex64, tuple[Count, Count]]

    @property
    def changed(self) -> int:
        return sum(chunk.changed for tensor in self.tensors for chunk in tensor.chunks)

    def to_bytes(self) -> bytes:
        return compressed(msgspec.json.encode(self))

    @classmethod
    def from_bytes(cls, stored: bytes, most: int) -> DeltaIndex:
        """Return the index in untrusted compressed bytes, checked.

        Its blobs have to lie before byte `most` of the file. Raises DeltaFormatError.
        """
        raw = decompressed(stored, _MAX_INDEX_BYTES)
        try:
            form = msgspec.json.decode(raw, type=_Format).format
            if form != FORMAT:
                raise DeltaFormatError(f"delta of format {form}; {FORMAT} is known here")
            index = msgspec.json.decode(raw, type=cls)
            for tensor in index.tensors:
                check_tiling(tensor)
        except (*MALFORMED, ManifestError) as error:
            raise DeltaFormatError(f"its index cannot be read: {error!s:.200}") from error
        for file in index.files:
            _check_file(file)
        if len({file.path for file in index.files}) != len(index.files):
            raise DeltaFormatError("its index lists a file twice")
        for offset, length in index.blobs.values():
            if offset < len(MAGIC) or offset + length > most:
                raise DeltaFormatError("its index names bytes that the file has not")
        return index


class Delta:
    """Delta file that is mapped for reading, with its parsed index."""

    def __init__(self, path: Path, index: DeltaIndex, data: mmap.mmap) -> None:
        self.path = path
        self.index = index
        self._data = data

    @classmethod
    def open(cls, path: Path) -> Delta:
        """Return the delta in a file, its index checked.

        Raises DeltaFormatError that names the file.
        """
        if not path.is_file():
            raise DeltaFormatError(f"{path}: no such file")
        size = path.stat().st_size
        if size < len(MAGIC) + TAIL.size:
            raise DeltaFormatError(f"{path}: not a delta ({size} bytes)")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        offset, length, digest, end = TAIL.unpack(data[size - TAIL.size :])
        if data[: len(MAGIC)] != MAGIC or end != _END:
            raise DeltaFormatError(f"{path}: not a delta of format {FORMAT}, or cut off")
        if offset < len(MAGIC) or offset + length + TAIL.size != size:
            raise DeltaFormatError(f"{path}: its index lies outside the file")
        stored = data[offset : offset + length]
        if blake3.blake3(stored).digest() != digest:
            raise DeltaFormatError(f"{path}: its index is damaged; get the file again")
        try:
            return cls(path, DeltaIndex.from_bytes(stored, offset), data)
        except DeltaFormatError as error:
            raise DeltaFormatError(f"{path}: {error}") from error

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def blob(self, name: str) -> bytes:
        """Return a blob, verified against its name. Raises DeltaFormatError, ChunkDigestError."""
        if name not in self.index.blobs:
            raise DeltaFormatError(f"{self.path}: blob {name} is not in it")
        offset, length = self.index.blobs[name]
        raw = self._data[offset : offset + length]
        check_id(name, raw)
        return raw

    def unpacked(self, name: str, size: int) -> bytes:
        """Return the decompressed content of a blob, of at most `size` bytes.

        Raises like `blob`.
        """
        return decompressed(self.blob(name), size)


def tail_of(offset: int, stored: bytes) -> bytes:
    """Return the last bytes of a delta file whose index `stored` begins at byte `offset`."""
    return TAIL.pack(offset, len(stored), blake3.blake3(stored).digest(), _END)


def compressed(raw: bytes) -> bytes:
    """Return bytes that are not a chunk, compressed by zstd."""
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)


def decompressed(packed: bytes, most: int) -> bytes:
    """Return untrusted bytes, decompressed to at most `most` bytes. Raises DeltaFormatError."""
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= most:
            raise DeltaFormatError(f"a compressed part claims {size} bytes, {most} are possible")
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            packed, max_output_size=max(1, size), allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise DeltaFormatError(f"a compressed part is damaged: {error}") from error


def _check_file(file: DeltaFile) -> None:
    parts = file.path.split("/")
    if not all(parts) or file.path.startswith("/") or {".", ".."} & set(parts) or "\0" in file.path:
        raise DeltaFormatError(f"{file.path!r:.200} is no path inside a checkpoint")
    if sum(map(bool, (file.head, file.blob, file.same))) != 1:
        raise DeltaFormatError(f"{file.path:.200} is described in no way or in several")

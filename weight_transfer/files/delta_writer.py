"""Writer of delta files: compares two checkpoints on disk chunk by chunk, in all threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import blake3

from weight_transfer.chunk_store import draft
from weight_transfer.errors import TensorFormatError
from weight_transfer.files.delta_file import (
    FORMAT,
    MAGIC,
    Delta,
    DeltaFile,
    DeltaIndex,
    compressed,
    tail_of,
)
from weight_transfer.format.checkpoint import Checkpoint
from weight_transfer.format.chunk import (
    DEFAULT_CHUNK_BYTES,
    EncodedChunk,
    chunk_id,
    encode_chunk,
    in_order,
    row_ranges,
    update_of,
)
from weight_transfer.format.delta_codec import Level
from weight_transfer.format.digest import MODULUS, digest_of, digest_part
from weight_transfer.format.manifest import TensorUpdate, hex_digest
from weight_transfer.format.tensors import TensorBits
from weight_transfer.publish.level import quicker_level

Progress = Callable[[int], None]
"""Callback with the number of bytes of the new checkpoint that were done since the last call."""
Rows = tuple[int, int]
Result = TypeVar("Result")


def nothing_told(_: int) -> None:
    """Ignore the number of bytes that are done: a progress callback that shows nothing."""


@dataclass(frozen=True, slots=True)
class DiffSettings:
    """Settings of a diff between checkpoints.

    `level`: codec level; None chooses the one that is done first on a link of `link_bytes_s`, by a
    sample. `chunk_bytes`: unencoded bytes of a chunk. `threads`: chunks worked on at once.
    """

    level: Level | None = Level.FAST
    link_bytes_s: float = 125e6
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    threads: int = os.cpu_count() or 1


def diff(
    old: Checkpoint,
    new: Checkpoint,
    out: Path,
    settings: DiffSettings | None = None,
    progress: Progress = nothing_told,
) -> Delta:
    """Write a delta file that turns `old` into `new` to `out`, which must not exist.

    Return it, opened. After an error nothing is left at `out`. Raises WeightError or OSError.
    """
    settings = settings or DiffSettings()
    if old.single != new.single:
        raise TensorFormatError("compare a file with a file, or a folder with a folder")
    with draft(out) as path, path.open("wb") as file, ThreadPoolExecutor(settings.threads) as pool:
        _Writer(file, old, new, settings, progress, pool).write()
    return Delta.open(out)


class _Writer:
    """Writer of one delta file from two checkpoints, compared tensor by tensor."""

    def __init__(
        self,
        file: BinaryIO,
        old: Checkpoint,
        new: Checkpoint,
        settings: DiffSettings,
        progress: Progress,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._file = file
        self._old = old
        self._new = new
        self._settings = settings
        self._progress = progress
        self._pool = pool
        self._at = 0
        self._blobs: dict[str, tuple[int, int]] = {}
        self._fresh: set[str] = set()
        self._level = settings.level or self._quicker()

    def write(self) -> None:
        self._append(MAGIC)
        files = [self._shard(shard.path, shard.head, shard.size) for shard in self._new.shards]
        files += [self._other(path) for path in self._new.others]
        tensors = tuple(self._tensor(name) for name in self._new.names)
        index = DeltaIndex(
            format=FORMAT,
            level=self._level.value,
            single=self._new.single,
            files=tuple(files),
            tensors=tensors,
            fresh=tuple(sorted(self._fresh)),
            blobs=self._blobs,
        ).to_bytes()
        offset = self._at
        self._append(index)
        self._append(tail_of(offset, index))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _append(self, raw: bytes) -> None:
        self._file.write(raw)
        self._at += len(raw)

    def _blob(self, raw: bytes) -> str:
        name = chunk_id(raw)
        if name not in self._blobs:
            self._blobs[name] = self._at, len(raw)
            self._append(raw)
        return name

    def _shard(self, path: str, head: bytes, size: int) -> DeltaFile:
        return DeltaFile(path, size, head=self._blob(compressed(head)))

    def _other(self, path: str) -> DeltaFile:
        raw = self._new.file(path).read_bytes()
        if path in self._old.others and self._old.file(path).read_bytes() == raw:
            return DeltaFile(path, len(raw), same=blake3.blake3(raw).hexdigest())
        return DeltaFile(path, len(raw), blob=self._blob(compressed(raw)))

    def _tensor(self, name: str) -> TensorUpdate:
        new = self._new.tensor(name)
        old = self._base_of(new)
        ranges = list(row_ranges(new, self._settings.chunk_bytes))
        parts = self._in_threads(lambda rows: _part(old, rows), ranges)
        before = sum(parts) % MODULUS
        return update_of(old, before, self._encoded(old, new, ranges, before), self._blob)

    def _base_of(self, new: TensorBits) -> TensorBits:
        if self._alike(new.name):
            return self._old.tensor(new.name)
        self._fresh.add(new.name)
        return new.zeros()

    def _encoded(
        self, old: TensorBits, new: TensorBits, ranges: Iterable[Rows], digest: int
    ) -> Iterator[EncodedChunk]:
        level = self._level
        encode = lambda rows: encode_chunk(old, new, rows, digest, level)  # noqa: E731
        for chunk in self._in_threads(encode, ranges):
            yield chunk
            header = chunk.header
            self._progress((header.end_row - header.first_row) * new.row_elements * header.width)

    def _quicker(self) -> Level:
        """Return the level that is quicker for the largest tensor that both checkpoints have."""
        common = (name for name in self._new.names if self._alike(name))
        largest = max(common, key=lambda name: self._new.tensor(name).bits.nbytes, default=None)
        if largest is None:
            return Level.FAST
        old, new = self._old.tensor(largest), self._new.tensor(largest)
        return quicker_level(old, new, self._settings.link_bytes_s, self._settings.threads)

    def _alike(self, name: str) -> bool:
        old, new = self._old.entry(name), self._new.entry(name)
        return (
            old is not None and new is not None and (old.dtype, old.shape) == (new.dtype, new.shape)
        )

    def _in_threads(
        self, work: Callable[[Rows], Result], items: Iterable[Rows]
    ) -> Iterator[Result]:
        return in_order(self._pool, self._settings.threads, work, items)


def _part(tensor: TensorBits, rows: Rows) -> int:
    first, end = (row * tensor.row_elements for row in rows)
    return digest_part(tensor.bits[first:end], first)


def whole_digest(tensor: TensorBits) -> str:
    """Return the digest of a tensor as 16 hex digits, as a manifest writes it."""
    return hex_digest(digest_of(tensor.bits))

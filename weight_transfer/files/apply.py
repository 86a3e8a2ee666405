"""Applying deltas on disk: a base and a chain of deltas become the last delta's checkpoint.

Each tensor is copied once and then overwritten where it changed, in the output's own bytes: memory
holds what changes of a chunk, whatever the model's size. Every tensor's digest is checked before
the first and after each delta; the output appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import blake3
import numpy as np

from weight_transfer.chunk_store import draft
from weight_transfer.errors import (
    ChunkFormatError,
    DeltaFormatError,
    DigestMismatchError,
    WrongBaseError,
)
from weight_transfer.files.delta_file import Delta, DeltaFile
from weight_transfer.files.delta_writer import Progress, nothing_told, whole_digest
from weight_transfer.format.checkpoint import Checkpoint, parse_head, view
from weight_transfer.format.chunk import overwrite_chunk, parse_header
from weight_transfer.format.digest import MODULUS, digest_of
from weight_transfer.format.manifest import ChunkRef, TensorUpdate, hex_digest
from weight_transfer.format.tensors import TensorBits

_MAX_HEAD_BYTES = 100_000_008
_COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of applying deltas: weights that each delta changed, and bytes of the written
    files."""

    changed: tuple[int, ...]
    nbytes: int


def apply_deltas(
    base: Checkpoint,
    deltas: Sequence[Delta],
    out: Path,
    threads: int = os.cpu_count() or 1,
    progress: Progress = nothing_told,
) -> Applied:
    """Apply a chain of delta files to `base`, write the last one's checkpoint to `out`.

    Return counts. Raises WrongBaseError when a delta was made for other weights, other WeightErrors
    for damaged ones, and OSError. After an error nothing is left at `out`; `base` is only read.
    """
    last = deltas[-1]
    if last.index.single != base.single:
        raise WrongBaseError("a delta between folders needs a folder, one between files a file")
    with draft(out, folder=not last.index.single) as root, ThreadPoolExecutor(threads) as pool:
        chain = _Chain(base, deltas, pool)
        total = 0
        for file in last.index.files:
            path = root / file.path if not last.index.single else root
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.head:
                _write_shard(path, file, chain, progress)
            else:
                path.write_bytes(_other(file, base, deltas))
            _sync_file(path)
            total += file.size
        chain.all_found()
    return Applied(tuple(delta.index.changed for delta in deltas), total)


class _Chain:
    """Chain of deltas on a base checkpoint, applied tensor by tensor."""

    def __init__(self, base: Checkpoint, deltas: Sequence[Delta], pool: ThreadPoolExecutor) -> None:
        self._base = base
        self._deltas = deltas
        self._pool = pool
        self._updates = [{t.name: t for t in delta.index.tensors} for delta in deltas]
        self._fresh = [frozenset(delta.index.fresh) for delta in deltas]
        self._left = set(self._updates[-1])

    def head(self, file: DeltaFile) -> bytes:
        """Return the first bytes (header) of a safetensors file of the result."""
        return self._deltas[-1].unpacked(file.head, _MAX_HEAD_BYTES)

    def write(self, tensor: TensorBits) -> None:
        """Fill a tensor of the result by all deltas.

        Its bits are zeros in the mapped output file.
        """
        last = self._updates[-1].get(tensor.name)
        if last is None or (last.dtype, last.shape) != (tensor.dtype, tensor.shape):
            raise DeltaFormatError(f"{self._deltas[-1].path}: says two things of {tensor.name}")
        self._left.discard(tensor.name)
        first = self._begin(tensor)
        for delta, updates in zip(self._deltas[first:], self._updates[first:], strict=True):
            self._step(delta, updates[tensor.name], tensor)

    def all_found(self) -> None:
        """Raise DeltaFormatError if a tensor of the last delta was in no file."""
        if self._left:
            raise DeltaFormatError(
                f"{self._deltas[-1].path}: no file holds {sorted(self._left)[0]}"
            )

    def _begin(self, tensor: TensorBits) -> int:
        """Fill a tensor with what the chain builds on.

        Return the index of the first delta to apply.
        """
        for at in range(len(self._deltas) - 1, -1, -1):
            if tensor.name in self._fresh[at]:
                return at
            update = self._updates[at].get(tensor.name)
            if update is None or (update.dtype, update.shape) != (tensor.dtype, tensor.shape):
                raise WrongBaseError(
                    f"{self._deltas[at].path}: {tensor.name} is not what the next delta builds on"
                )
        entry = self._base.entry(tensor.name)
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            raise WrongBaseError(f"{self._base.root}: has no {tensor.name} like the deltas' own")
        source = self._base.tensor(tensor.name).bits
        step = max(1, _COPY_BYTES // source.itemsize)
        for at in range(0, source.size, step):
            tensor.bits[at : at + step] = source[at : at + step]
        return 0

    def _step(self, delta: Delta, update: TensorUpdate, tensor: TensorBits) -> None:
        digest = before = digest_of(tensor.bits)
        if update.digest_before != hex_digest(digest):
            raise WrongBaseError(
                f"{delta.path}: {tensor.name} was made for other weights; give the checkpoint, or"
                " the deltas, that it builds on"
            )

        def overwrite(ref: ChunkRef) -> int:
            return _overwritten(delta, ref, tensor, before)

        digest += sum(self._pool.map(overwrite, update.chunks))
        if update.digest_after != hex_digest(digest % MODULUS):
            raise DigestMismatchError(f"{delta.path}: {tensor.name} is not what was published")


def _overwritten(delta: Delta, ref: ChunkRef, tensor: TensorBits, digest: int) -> int:
    encoded = delta.blob(ref.id)
    header = parse_header(encoded)
    actual = header.ref(ref.id)
    if (actual.rows, actual.columns) != (ref.rows, ref.columns):
        raise ChunkFormatError(f"{delta.path}: chunk {ref.id} holds other rows than its index says")
    return overwrite_chunk(encoded, tensor, digest)


def _write_shard(path: Path, file: DeltaFile, chain: _Chain, progress: Progress) -> None:
    head = chain.head(file)
    entries = parse_head(head, file.size, file.path)
    with path.open("wb") as stream:
        # All of it now: a full disk is found before the work, and no page can fail later.
        os.posix_fallocate(stream.fileno(), 0, file.size)
    data = np.memmap(path, dtype=np.uint8, mode="r+").view(np.ndarray)
    data[: len(head)] = np.frombuffer(head, np.uint8)
    for entry in entries:
        chain.write(view(data, entry))
        progress(entry.end - entry.begin)


def _other(file: DeltaFile, base: Checkpoint, deltas: Sequence[Delta]) -> bytes:
    """Return the content of a file without tensors, of the last delta that has it, or of the base.

    Raises WrongBaseError where the base's file is another one.
    """
    for delta in reversed(deltas):
        entry = next((f for f in delta.index.files if f.path == file.path), None)
        if entry is None:
            break
        if entry.blob:
            return delta.unpacked(entry.blob, entry.size)
    if file.path in base.others:
        raw = base.file(file.path).read_bytes()
        if blake3.blake3(raw).hexdigest() == file.same:
            return raw
    raise WrongBaseError(f"{base.root}: {file.path} is not the file that the deltas build on")


def mismatches(checkpoint: Checkpoint, tensors: Sequence[TensorUpdate]) -> Iterator[str]:
    """Yield a line of text for each tensor in which a checkpoint differs from a manifest's
    `tensors`."""
    wanted = {tensor.name: tensor for tensor in tensors}
    for name in sorted(wanted.keys() | set(checkpoint.names)):
        entry, tensor = checkpoint.entry(name), wanted.get(name)
        if tensor is None:
            yield f"{name}: not in the manifest"
        elif entry is None:
            yield f"{name}: missing"
        elif (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            yield f"{name}: {entry.dtype} {entry.shape}, not {tensor.dtype} {tensor.shape}"
        elif whole_digest(checkpoint.tensor(name)) != tensor.digest_after:
            yield f"{name}: its weights differ"


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

"""Encoder of one rank's shard: turns the changes since the last published version into chunks.

A rank reads and keeps its own pieces of the weights, nothing more.

parts    the rank's share of each tensor's digest              → coordinator, before version one
encode   changes since the baseline, as chunks in its store    → coordinator
advance  the version is published: its bits are the baseline

The baseline advances by decoding the rank's own chunks: it is exactly the published version,
whatever the trainer has done to its weights since. A publication that fails changes nothing here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from weight_transfer.bounded_map import in_order
from weight_transfer.errors import ShardError
from weight_transfer.format.chunk import (
    DEFAULT_CHUNK_BYTES,
    HEADER,
    chunk_id,
    encode_block,
    parse_header,
)
from weight_transfer.format.delta_codec import Level, decode_payload
from weight_transfer.format.digest import MODULUS, Block, block_part
from weight_transfer.format.manifest import ChunkRef, Manifest
from weight_transfer.format.tensors import WIDTHS, Bits, unsigned, weight_class_of
from weight_transfer.publish.shard_coordinator import ShardReport, ShardTensor
from weight_transfer.publish.sharding import LocalTensor, Piece
from weight_transfer.store.chunk_store import ChunkStore


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A block of a piece; `bits` are its weights, row by row and the rank's own copy."""

    piece: Piece
    dtype: str
    block: Block
    bits: Bits

    @property
    def tensor(self) -> str:
        """The checkpoint tensor that it is of."""
        return self.piece.tensor

    def read(self, weights: Mapping[str, LocalTensor]) -> Bits:
        """The same weights as the trainer has them now."""
        return _read(self.piece, self.block, weights)


def hold(
    pieces: Sequence[Piece], weights: Mapping[str, LocalTensor], chunk_bytes: int
) -> tuple[HeldPart, ...]:
    """Copy the pieces out of `weights`, part by part. Raises ShardError where they do not fit."""
    check_fit(pieces, weights)
    return tuple(part for piece in pieces for part in _parts(piece, weights, chunk_bytes))


def check_fit(pieces: Sequence[Piece], weights: Mapping[str, LocalTensor]) -> None:
    """Raise ShardError unless each piece lies inside its parameter."""
    for piece in pieces:
        parameter = weights.get(piece.parameter)
        if parameter is None:
            raise ShardError(f"{piece.tensor}: this rank has no parameter {piece.parameter}")
        if parameter.dtype not in WIDTHS:
            raise ShardError(f"{piece.parameter}: dtype {parameter.dtype} is not carried")
        if piece.offset < 0 or piece.end > parameter.elements:
            raise ShardError(
                f"{piece.tensor}: {piece.parameter} has {parameter.elements} weights here, its"
                f" piece takes {piece.offset}..{piece.end}; is it sharded in another way?"
            )


def _parts(
    piece: Piece, weights: Mapping[str, LocalTensor], chunk_bytes: int
) -> Iterator[HeldPart]:
    dtype = weights[piece.parameter].dtype
    for block in piece.block.parts(chunk_bytes // WIDTHS[dtype]):
        bits = _read(piece, block, weights)
        assert bits.size == block.elements
        assert bits.dtype == unsigned(WIDTHS[dtype])
        yield HeldPart(piece, dtype, block, bits.copy())


def _read(piece: Piece, block: Block, weights: Mapping[str, LocalTensor]) -> Bits:
    rows = block.rows[1] - block.rows[0]
    offset = piece.offset + (block.rows[0] - piece.block.rows[0]) * piece.stride
    return weights[piece.parameter].read(offset, rows, block.width, piece.stride)


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """`chunk_bytes`: dense bytes of a chunk; each of `threads` holds about two of them at once."""

    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    level: Level = Level.FAST
    threads: int = os.cpu_count() or 1


class ShardEncoder:
    """One rank's pieces of the version that was published last."""

    def __init__(
        self,
        store: ChunkStore,
        rank: int,
        pieces: Sequence[Piece],
        weights: Mapping[str, LocalTensor],
        version: int = 0,
        settings: ShardSettings | None = None,
    ) -> None:
        """Copy this rank's pieces out of `weights`, which are `version`. Raises ShardError."""
        self._store = store
        self._rank = rank
        self._pieces = tuple(pieces)
        self._settings = settings or ShardSettings()
        self._held = hold(pieces, weights, self._settings.chunk_bytes)
        self._version: int | None = version
        self._pending: tuple[int, tuple[ChunkRef, ...]] | None = None

    @property
    def version(self) -> int:
        if self._version is None:
            raise ShardError(f"rank {self._rank} lost its baseline; begin from a checkpoint")
        return self._version

    def parts(self, *, of_zeros: bool = False) -> ShardReport:
        """Its share of each tensor's digest; `of_zeros`: of the tensors that a base builds on."""

        def part_of(part: HeldPart) -> tuple[None, int]:
            return None, block_part(np.zeros_like(part.bits) if of_zeros else part.bits, part.block)

        version = self.version
        return ShardReport(self._rank, version, version, self._by_tensor(self._each(part_of)))

    def encode(
        self, version: int, digests: Mapping[str, int], weights: Mapping[str, LocalTensor]
    ) -> ShardReport:
        """Encode the step from the baseline to `weights`, which must stay as they are meanwhile.

        `digests`: of whole tensors, in the baseline's version. Changed chunks are durable when it
        returns. Raises ShardError, StoreError.
        """
        parent, self._pending = self.version, None
        check_fit(self._pieces, weights)
        for part in self._held:
            if weights[part.piece.parameter].dtype != part.dtype:
                raise ShardError(f"{part.piece.parameter} is not {part.dtype} any more")
        encoded = self._encoded(digests, lambda part: (part.bits, part.read(weights)))
        self._pending = version, tuple(ref for ref, _ in encoded)
        return ShardReport(self._rank, version, parent, self._by_tensor(encoded))

    def encode_base(self, digests: Mapping[str, int]) -> ShardReport:
        """Encode all of the baseline, for those who join; `digests`: of tensors of zeros."""
        encoded = self._encoded(digests, lambda part: (np.zeros_like(part.bits), part.bits))
        return ShardReport(self._rank, self.version, self.version, self._by_tensor(encoded))

    def advance(self, manifest: Manifest) -> None:
        """The version that was encoded last is published: hold it from now on.

        Raises ShardError when `manifest` is not made of this rank's report; the baseline stays.
        """
        version, refs = self._pending or (None, ())
        if (manifest.version, manifest.parent) != (version, self.version):
            raise ShardError(
                f"rank {self._rank} did not encode version {manifest.version} on {manifest.parent}"
            )
        self._check_named(manifest, refs)
        work = [(part, ref) for part, ref in zip(self._held, refs, strict=True) if ref.changed]
        self._version = None  # Half-way between two versions it holds neither.
        with ThreadPoolExecutor(self._settings.threads) as pool:
            for _ in in_order(pool, self._settings.threads, self._overwrite, work):
                pass
        self._version, self._pending = manifest.version, None

    def _check_named(self, manifest: Manifest, refs: Iterable[ChunkRef]) -> None:
        named = {t.name: {replace(c, origin=None) for c in t.chunks} for t in manifest.tensors}
        for part, ref in zip(self._held, refs, strict=True):
            chunks = named.get(part.tensor, set())
            if ref not in chunks and (chunks or ref.changed):
                raise ShardError(
                    f"version {manifest.version} leaves out what rank {self._rank} reported of "
                    f"{part.tensor}"
                )

    def _overwrite(self, work: tuple[HeldPart, ChunkRef]) -> None:
        part, ref = work
        encoded = self._store.get(ref.id)
        header = parse_header(encoded)
        payload = memoryview(encoded)[HEADER.size :]
        indices, values = decode_payload(header.encoding, header.changed, payload, part.bits)
        part.bits[indices] = values

    def _encoded(
        self, digests: Mapping[str, int], step: Callable[[HeldPart], tuple[Bits, Bits]]
    ) -> list[tuple[ChunkRef, int]]:
        unknown = sorted({part.tensor for part in self._held} - digests.keys())
        if unknown:
            raise ShardError(f"the digest of {unknown[0]} before this version is not known")

        def encoded(part: HeldPart) -> tuple[ChunkRef, int]:
            old, new = step(part)
            kind, base = weight_class_of(part.dtype), digests[part.tensor]
            chunk = encode_block(old, new, part.block, kind, base, self._settings.level)
            changed = chunk.header.changed
            name = self._store.put(chunk.encoded) if changed else chunk_id(chunk.encoded)
            return chunk.header.ref(name), chunk.digest_change

        return list(self._each(encoded))

    def _each(self, work: Callable[[HeldPart], Result]) -> Iterator[Result]:
        with ThreadPoolExecutor(self._settings.threads) as pool:
            yield from in_order(pool, self._settings.threads, work, self._held)

    def _by_tensor(self, results: Iterable[tuple[ChunkRef | None, int]]) -> tuple[ShardTensor, ...]:
        parts = {part.tensor: part for part in self._held}
        digests = dict.fromkeys(parts, 0)
        chunks: dict[str, list[ChunkRef]] = {name: [] for name in parts}
        for part, (ref, digest) in zip(self._held, results, strict=True):
            digests[part.tensor] = (digests[part.tensor] + digest) % MODULUS
            chunks[part.tensor] += [] if ref is None else [ref]
        return tuple(
            ShardTensor(name, part.dtype, part.piece.shape, digests[name], tuple(chunks[name]))
            for name, part in parts.items()
        )

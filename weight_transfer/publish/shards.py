"""A sharded publication: each rank encodes its shard, one coordinator makes a signed version of it.

A rank reads and keeps its own pieces of the weights, nothing more; the coordinator sees no weights:
a rank's report is JSON of a few hundred bytes for each chunk.

parts    the rank's share of each tensor's digest          → coordinator, before version one:
         digest of each tensor, which the ranks put into their chunks
encode   changes since the baseline, as chunks in its store → coordinator: do they cover every
         tensor exactly once? → manifest, published
advance  the version is published: its bits are the rank's baseline

The baseline advances by decoding the rank's own chunks: it is exactly the published version,
whatever the trainer has done to its weights since. A report that is missing or of another version
publishes nothing: the version before stays the newest, no baseline moves, and the ranks can report
again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import ShardError
from weight_transfer.format.chunk import (
    DEFAULT_CHUNK_BYTES,
    HEADER,
    chunk_id,
    encode_block,
    encode_nothing,
    in_order,
    parse_header,
)
from weight_transfer.format.delta_codec import Level, decode_payload
from weight_transfer.format.digest import MODULUS, Block, block_part
from weight_transfer.format.manifest import (
    MALFORMED,
    ChunkRef,
    Count,
    Manifest,
    Name,
    Shape,
    TensorUpdate,
    Word,
    check_tiling,
    hex_digest,
)
from weight_transfer.format.tensors import WIDTHS, Bits, unsigned, weight_class_of
from weight_transfer.publish.sharding import LocalTensor, Piece
from weight_transfer.publish.version_publisher import VersionPublisher

Spec = tuple[str, tuple[int, ...]]
"""Type name and shape of a checkpoint tensor."""


class ShardTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's blocks of a checkpoint tensor, as its report lists them.

    `digest`, mod 2^64: in a report without chunks, what the blocks add to the tensor's digest; in
    one with chunks, the increase of the digest. Chunks that change nothing are listed but not
    stored.
    """

    name: Name
    dtype: Word
    shape: Shape
    digest: Annotated[int, Meta(ge=0)]
    chunks: tuple[ChunkRef, ...] = ()

    @property
    def spec(self) -> Spec:
        return self.dtype, self.shape


class ShardReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Report of one rank about its blocks of a version.

    `parent` below `version`: chunks of the step between them. Both equal: chunks of a base, or,
    without chunks, the blocks' shares of digests.
    """

    rank: Count
    version: Count
    parent: Count
    tensors: tuple[ShardTensor, ...]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> ShardReport:
        """Return the rank's report in untrusted JSON. Raises ShardError."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except MALFORMED as error:
            raise ShardError(f"not a rank's report: {error!s:.200}") from error


class ShardCoordinator:
    """Coordinator that merges the reports of all `ranks` ranks into signed versions of one job."""

    def __init__(
        self,
        publisher: VersionPublisher,
        ranks: int,
        origins: Sequence[str] = (),
    ) -> None:
        """Prepare a coordinator whose versions `publisher` signs and stores.

        `origins`: address that serves each rank's store, "" for ranks that put chunks into the
        publisher's store. Raise ShardError unless there is one for each rank, or none.
        """
        if origins and len(origins) != ranks:
            raise ShardError(f"{len(origins)} origins for {ranks} ranks; give one for each or none")
        self._store = publisher.store
        self._ranks = ranks
        self._urls = tuple(dict.fromkeys(url for url in origins if url))
        self._origins = [self._urls.index(url) if url else None for url in origins]
        self._origins = self._origins or [None] * ranks
        self._publisher = publisher
        self._known: tuple[int, Mapping[str, int]] | None = None

    @property
    def digests(self) -> Mapping[str, int]:
        """Digest of each tensor in the version that the ranks hold.

        Raises ShardError before `begin`.
        """
        return self._begun()[1]

    def begin(self, parts: Iterable[ShardReport]) -> Mapping[str, int]:
        """Merge all ranks' reports of the version they start from.

        Return the digest of each tensor. Raises ShardError where a version of that number is
        published with other weights: a trainer that resumed from another checkpoint would publish
        deltas that no reader can apply.
        """
        reports = tuple(parts)
        version = reports[0].version if reports else 0
        digests = self.merged(version, reports)
        for base in (False, True):
            path = self._store.manifest_path(version, base=base)
            if path.is_file() and Manifest.from_bytes(path.read_bytes()).digests != digests:
                raise ShardError(f"the ranks begin from other weights than version {version}'s")
        self._known = version, digests
        return digests

    def merged(self, version: int, parts: Iterable[ShardReport]) -> Mapping[str, int]:
        """Return the digest of each tensor, added up from all ranks' reports of one version."""
        by_tensor = self._by_tensor(version, version, parts)
        return {name: _sum(shards) for name, shards in by_tensor.items()}

    def publish(self, version: int, reports: Iterable[ShardReport]) -> Manifest:
        """Publish `version` on top of the version that the ranks hold; return its durable manifest.

        Raises ShardError, ManifestError or StoreError, and then nothing is published.
        """
        parent, before = self._begun()
        if version <= parent:
            raise ShardError(f"version {version} does not follow {parent}; take the next")
        updates = self._updates(version, parent, before, reports)
        manifest = self._publisher.publish_updates(version, parent, updates, self._urls)
        self._known = version, manifest.digests
        return manifest

    def publish_base(self, zeros: Mapping[str, int], reports: Iterable[ShardReport]) -> Manifest:
        """Publish all weights of the version that the ranks hold; return the base's manifest.

        `zeros`: digests of tensors of zeros, by `merged`. Raises like `publish`, and when the ranks
        hold other weights than were published.
        """
        version, digests = self._begun()
        updates = self._updates(version, version, zeros, reports)
        strayed = [t.name for t in updates if digests[t.name] != int(t.digest_after, 16)]
        if strayed:
            raise ShardError(f"{strayed[0]}: the ranks hold other weights than were published")
        return self._publisher.publish_updates(version, version, updates, self._urls)

    def _begun(self) -> tuple[int, Mapping[str, int]]:
        if self._known is None:
            raise ShardError("no digests are known yet; begin with the parts of all ranks")
        return self._known

    def _by_tensor(
        self, version: int, parent: int, reports: Iterable[ShardReport]
    ) -> dict[str, list[tuple[int, ShardTensor]]]:
        """Return (rank, its blocks) of each tensor by name, from one report of every rank.

        Raises ShardError for a missing, doubled or contradictory report.
        """
        seen: set[int] = set()
        tensors: dict[str, list[tuple[int, ShardTensor]]] = {}
        for report in reports:
            _check(report, version, parent)
            if report.rank in seen or report.rank >= self._ranks:
                raise ShardError(f"rank {report.rank} of {self._ranks} reported out of turn")
            seen.add(report.rank)
            for shard in report.tensors:
                others = tensors.setdefault(shard.name, [])
                if others and others[0][1].spec != shard.spec:
                    raise ShardError(
                        f"{shard.name} is {others[0][1].spec} on rank {others[0][0]} and"
                        f" {shard.spec} on rank {report.rank}"
                    )
                others.append((report.rank, shard))
        missing = sorted(set(range(self._ranks)) - seen)
        if missing:
            raise ShardError(f"no report from rank {missing[0]}; publish again with all ranks")
        return tensors

    def _updates(
        self,
        version: int,
        parent: int,
        before: Mapping[str, int],
        reports: Iterable[ShardReport],
    ) -> tuple[TensorUpdate, ...]:
        by_tensor = self._by_tensor(version, parent, reports)
        if by_tensor.keys() != before.keys():
            odd = sorted(by_tensor.keys() ^ before.keys())
            raise ShardError(f"the ranks do not report the tensors they began with: {odd[:4]}")
        return tuple(self._update(before[name], by_tensor[name]) for name in sorted(by_tensor))

    def _update(self, before: int, shards: list[tuple[int, ShardTensor]]) -> TensorUpdate:
        after = (before + _sum(shards)) % MODULUS
        first = shards[0][1]
        refs = [(rank, ref) for rank, shard in shards for ref in shard.chunks]
        refs.sort(key=lambda found: (found[1].rows[0], found[1].columns or (0, 0)))
        update = TensorUpdate(
            name=first.name,
            dtype=first.dtype,
            shape=first.shape,
            digest_before=hex_digest(before),
            digest_after=hex_digest(after),
            chunks=tuple(ref for _, ref in refs),
        )
        if not refs:
            raise ShardError(f"{first.name}: no rank reports a chunk of it")
        check_tiling(update)
        if not any(ref.changed for _, ref in refs):
            return replace(update, chunks=())
        return replace(update, chunks=tuple(self._placed(update, *found) for found in refs))

    def _placed(self, update: TensorUpdate, rank: int, ref: ChunkRef) -> ChunkRef:
        if ref.changed:
            return replace(ref, origin=self._origins[rank])
        # Such a chunk is a header alone: no rank needs to keep a file for it.
        width, before = WIDTHS[update.dtype], int(update.digest_before, 16)
        nothing = encode_nothing(update.shape, ref, width, before)
        if self._store.put(nothing) != ref.id:
            raise ShardError(f"rank {rank} built {update.name} on another digest; begin again")
        return ref


def _check(report: ShardReport, version: int, parent: int) -> None:
    if (report.version, report.parent) != (version, parent):
        raise ShardError(
            f"rank {report.rank} reports version {report.version} on {report.parent}, wanted is"
            f" {version} on {parent}; it missed one, begin again with all ranks"
        )


def _sum(shards: Iterable[tuple[int, ShardTensor]]) -> int:
    return sum(shard.digest for _, shard in shards) % MODULUS


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A block of a piece that fits one chunk, with a copy of its weights in the held version.

    `bits`: the weights, row by row.
    """

    piece: Piece
    dtype: str
    block: Block
    bits: Bits

    @property
    def tensor(self) -> str:
        """Name of the checkpoint tensor that the block belongs to."""
        return self.piece.tensor

    def read(self, weights: Mapping[str, LocalTensor]) -> Bits:
        """Return the block's weights as they are now in the trainer's `weights`."""
        return _read(self.piece, self.block, weights)


def hold(
    pieces: Sequence[Piece], weights: Mapping[str, LocalTensor], chunk_bytes: int
) -> tuple[HeldPart, ...]:
    """Return copies of the pieces' weights in `weights`, cut into parts of at most `chunk_bytes`.

    Raises ShardError where a piece does not fit its parameter.
    """
    check_fit(pieces, weights)
    return tuple(part for piece in pieces for part in _parts(piece, weights, chunk_bytes))


def check_fit(pieces: Sequence[Piece], weights: Mapping[str, LocalTensor]) -> None:
    """Raise ShardError unless each piece lies inside its parameter and its type can be
    published."""
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
    """Settings of a ShardEncoder.

    `chunk_bytes`: dense bytes of a chunk. `level`: codec level. `threads`: chunks encoded at once,
    each of which takes about twice `chunk_bytes` of memory.
    """

    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    level: Level = Level.FAST
    threads: int = os.cpu_count() or 1


class ShardEncoder:
    """Encoder of one rank's pieces; it holds a copy of their bits in the last published version."""

    def __init__(
        self,
        store: ChunkStore,
        rank: int,
        pieces: Sequence[Piece],
        weights: Mapping[str, LocalTensor],
        version: int = 0,
        settings: ShardSettings | None = None,
    ) -> None:
        """Copy this rank's pieces out of `weights`, which are those of `version`.

        Raise ShardError.
        """
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
        """Return a report of what this rank's pieces add to each tensor's digest.

        `of_zeros`: as if all weights were zeros, which a base builds on.
        """

        def part_of(part: HeldPart) -> tuple[None, int]:
            return None, block_part(np.zeros_like(part.bits) if of_zeros else part.bits, part.block)

        version = self.version
        return ShardReport(self._rank, version, version, self._by_tensor(self._each(part_of)))

    def encode(
        self, version: int, digests: Mapping[str, int], weights: Mapping[str, LocalTensor]
    ) -> ShardReport:
        """Encode the step from the held version to `weights` as `version`.

        Return this rank's report. `weights` must not change meanwhile. `digests`: digests of the
        whole tensors in the held version. Chunks that change something are durable on return. The
        held version changes only by `advance`. Raises ShardError, StoreError.
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
        """Encode all held weights as a base; return this rank's report.

        `digests`: digests of the whole tensors when all weights are zeros.
        """
        encoded = self._encoded(digests, lambda part: (np.zeros_like(part.bits), part.bits))
        return ShardReport(self._rank, self.version, self.version, self._by_tensor(encoded))

    def advance(self, manifest: Manifest) -> None:
        """Make the version that was encoded last, and is now published, the held one.

        Raises ShardError when `manifest` is not made of this rank's report; the held version stays
        then.
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
        change = decode_payload(header.encoding, header.changed, payload, part.bits)
        part.bits[change.indices] = change.new

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

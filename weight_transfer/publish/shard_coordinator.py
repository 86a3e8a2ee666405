"""Coordinator of a sharded publication: makes one signed version from the reports of all ranks.

It sees no weights: a rank's report is JSON of a few hundred bytes for each chunk.

parts of all ranks   → digest of each tensor, which the ranks put into their chunks
chunks of all ranks  → do they cover every tensor exactly once? → manifest, published

A report that is missing or of another version publishes nothing: the version before stays the
newest, and the ranks can report again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from weight_transfer.errors import ShardError
from weight_transfer.format.chunk import encode_nothing
from weight_transfer.format.digest import MODULUS
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
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import WIDTHS
from weight_transfer.publish.version_publisher import DEFAULT_LIFETIME_S, VersionPublisher
from weight_transfer.store.chunk_store import ChunkStore

Spec = tuple[str, tuple[int, ...]]
"""Type and shape of a checkpoint tensor."""


class ShardTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's blocks of a checkpoint tensor.

    `digest`, mod 2^64: in a report of parts what they add to the tensor's digest; in one of chunks
    what it grows by. Chunks that change nothing are listed, and stored by nobody yet.
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
    """From one rank: chunks of the step from `parent` to `version`, or of all of `version`.

    The latter when both are the same; then, without chunks, it is of parts.
    """

    rank: Count
    version: Count
    parent: Count
    tensors: tuple[ShardTensor, ...]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> ShardReport:
        """Read untrusted bytes; raises ShardError."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except MALFORMED as error:
            raise ShardError(f"not a rank's report: {error!s:.200}") from error


class ShardCoordinator:
    """Publishes versions of one job that `ranks` ranks have encoded."""

    def __init__(
        self,
        store: ChunkStore,
        job: str,
        trainer: str,
        key: SigningKey,
        ranks: int,
        origins: Sequence[str] = (),
        lifetime_s: float = DEFAULT_LIFETIME_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`origins`: address of each rank's store, "" of those whose store is `store` itself."""
        if origins and len(origins) != ranks:
            raise ShardError(f"{len(origins)} origins for {ranks} ranks; give one for each or none")
        self._store = store
        self._ranks = ranks
        self._urls = tuple(dict.fromkeys(url for url in origins if url))
        self._origins = [self._urls.index(url) if url else None for url in origins]
        self._origins = self._origins or [None] * ranks
        self._publisher = VersionPublisher(
            store, job, trainer, key, lifetime_s=lifetime_s, clock=clock
        )
        self._known: tuple[int, Mapping[str, int]] | None = None

    @property
    def digests(self) -> Mapping[str, int]:
        """Digest of each tensor in the version that the ranks hold."""
        return self._begun()[1]

    def begin(self, parts: Iterable[ShardReport]) -> Mapping[str, int]:
        """Merge all ranks' parts of the version they start from; returns its tensors' digests.

        Raises ShardError where a version of that number is published and has other weights: a
        trainer that resumed from another checkpoint would diff against what nobody has.
        """
        reports = tuple(parts)
        version = reports[0].version if reports else 0
        digests = self.merged(version, reports)
        for base in (False, True):
            if self._store.manifest_path(version, base=base).is_file():
                published = self._store.get_manifest(version, base=base).tensors
                if {t.name: t.digest_after for t in published} != _hexed(digests):
                    raise ShardError(f"the ranks begin from other weights than version {version}'s")
        self._known = version, digests
        return digests

    def merged(self, version: int, parts: Iterable[ShardReport]) -> Mapping[str, int]:
        """Add up parts of one version: the digest of each tensor."""
        by_tensor = self._by_tensor(version, version, parts)
        return {name: _sum(shards) for name, shards in by_tensor.items()}

    def publish(self, version: int, reports: Iterable[ShardReport]) -> Manifest:
        """Publish `version` on top of the one that the ranks hold; durable when it returns.

        Raises ShardError, ManifestError or StoreError, and then nothing is published.
        """
        parent, before = self._begun()
        if version <= parent:
            raise ShardError(f"version {version} does not follow {parent}; take the next")
        updates = self._updates(version, parent, before, reports)
        manifest = self._publisher.publish_updates(version, parent, updates, self._urls)
        self._known = version, {t.name: int(t.digest_after, 16) for t in updates}
        return manifest

    def publish_base(self, zeros: Mapping[str, int], reports: Iterable[ShardReport]) -> Manifest:
        """Publish all weights of the version that the ranks hold; `zeros`: merged parts of zeros.

        Raises like `publish`, and when the ranks do not hold what was published.
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
        """Tensors by name, each as the ranks report it, from one good report of every rank."""
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


def _hexed(digests: Mapping[str, int]) -> dict[str, str]:
    return {name: hex_digest(digest) for name, digest in digests.items()}


def _sum(shards: Iterable[tuple[int, ShardTensor]]) -> int:
    return sum(shard.digest for _, shard in shards) % MODULUS

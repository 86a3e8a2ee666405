"""Publisher: the trainer's side. Diffs, encodes, stores, signs; the manifest goes last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from weight_transfer.chunk import DEFAULT_CHUNK_BYTES, encode_chunk, row_ranges
from weight_transfer.digest import digest_of
from weight_transfer.errors import ManifestError
from weight_transfer.manifest import CODEC, ChunkRef, Manifest, TensorUpdate, hex_digest
from weight_transfer.signing import SigningKey
from weight_transfer.store import ChunkStore
from weight_transfer.tensors import TensorBits

DEFAULT_LIFETIME_S = 24 * 3600.0


class Publisher:
    """Publishes versions of one job into a store."""

    def __init__(
        self,
        store: ChunkStore,
        job: str,
        trainer: str,
        key: SigningKey,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        lifetime_s: float = DEFAULT_LIFETIME_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._job = job
        self._trainer = trainer
        self._key = key
        self._chunk_bytes = chunk_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock

    def publish(
        self,
        version: int,
        parent: int,
        old: Mapping[str, TensorBits],
        new: Mapping[str, TensorBits],
    ) -> Manifest:
        """Publish the step from `old` (version `parent`) to `new` (version `version`).

        Returns once every chunk and the manifest are durable: the caller's baseline may then
        advance to `new`, whoever has pulled it yet.
        """
        if version <= parent:
            raise ManifestError(f"version {version} does not follow its parent {parent}")
        if old.keys() != new.keys():
            raise ManifestError(f"tensors differ: {sorted(old.keys() ^ new.keys())[:4]}")
        tensors = tuple(self._tensor(old[name], new[name]) for name in sorted(old))
        now_s = self._clock()
        manifest = Manifest(
            job=self._job,
            version=version,
            parent=parent,
            codec=CODEC,
            trainer=self._trainer,
            created_s=now_s,
            expires_s=now_s + self._lifetime_s,
            tensors=tensors,
        ).signed(self._key)
        self._store.put_manifest(manifest)
        return manifest

    def _tensor(self, old: TensorBits, new: TensorBits) -> TensorUpdate:
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise ManifestError(f"{old.name}: dtype or shape changed; publish a new base instead")
        before = after = digest_of(old.bits)
        chunks: list[ChunkRef] = []
        if not (old.bits == new.bits).all():
            after = digest_of(new.bits)
            for rows in row_ranges(old, self._chunk_bytes):
                chunks.append(self._chunk(old, new, rows, before))
        return TensorUpdate(
            old.name, old.dtype, old.shape, hex_digest(before), hex_digest(after), tuple(chunks)
        )

    def _chunk(
        self, old: TensorBits, new: TensorBits, rows: tuple[int, int], base_digest: int
    ) -> ChunkRef:
        header, encoded = encode_chunk(old, new, rows, base_digest)
        return ChunkRef(
            id=self._store.put(encoded),
            rows=rows,
            codec=header.encoding.name.lower(),
            encoded_bytes=len(encoded),
            changed=header.changed,
        )

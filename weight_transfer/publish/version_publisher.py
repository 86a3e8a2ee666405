"""VersionPublisher: diffs, encodes, stores, signs for a trainer; the manifest goes last."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import ManifestError, WrongBaseError
from weight_transfer.format.chunk import (
    DEFAULT_CHUNK_BYTES,
    chunk_id,
    encode_chunk,
    row_ranges,
    update_of,
)
from weight_transfer.format.delta_codec import Level
from weight_transfer.format.digest import digest_of
from weight_transfer.format.manifest import (
    CODEC,
    Adapter,
    Manifest,
    OnUpdate,
    TensorUpdate,
)
from weight_transfer.format.signing import SigningKey
from weight_transfer.format.tensors import AnyTensor

DEFAULT_LIFETIME_S = 24 * 3600.0
WRITERS: Final = 4
"""Small chunks that are written at once: a disk flushes several files in the time of one."""
SMALL_BYTES: Final = 1 << 20
Put = Callable[[bytes], str]
"""Function that stores a chunk and returns its name."""


class VersionPublisher:
    """Publisher of one job's versions from whole tensors: it encodes, stores and signs them."""

    def __init__(
        self,
        store: ChunkStore,
        job: str,
        trainer: str,
        key: SigningKey,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        lifetime_s: float = DEFAULT_LIFETIME_S,
        clock: Callable[[], float] = time.time,
        on_update: OnUpdate = OnUpdate.RECOMPUTE,
    ) -> None:
        self._store = store
        self._job = job
        self._trainer = trainer
        self._key = key
        self._chunk_bytes = chunk_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._on_update = on_update
        self._known: tuple[int | None, Mapping[str, int]] = None, {}
        self.adapter: Adapter | None = None
        """Settings of the LoRA adapter that the published versions are, None for whole weights."""

    @property
    def store(self) -> ChunkStore:
        """Store of the manifests and of the chunks that this process encodes."""
        return self._store

    def publish(
        self,
        version: int,
        parent: int,
        old: Mapping[str, AnyTensor],
        new: Mapping[str, AnyTensor],
        level: Level = Level.FAST,
    ) -> Manifest:
        """Publish the step from `old` (version `parent`) to `new` (`version`).

        Return its signed manifest. All chunks and the manifest are durable on return, so the
        trainer's baseline may advance to `new` at once, whichever readers have fetched it. Raises
        ManifestError, WrongBaseError, StoreError.
        """
        if version <= parent:
            raise ManifestError(f"version {version} does not follow its parent {parent}")
        if old.keys() != new.keys():
            raise ManifestError(f"tensors differ: {sorted(old.keys() ^ new.keys())[:4]}")
        before = self._digests_of(parent, old)
        with self._written() as put:
            tensors = tuple(
                self._tensor(old[name], new[name], before[name], level, put) for name in sorted(old)
            )
        return self.publish_updates(version, parent, tensors)

    def publish_base(self, version: int, tensors: Mapping[str, AnyTensor]) -> Manifest:
        """Publish all weights of a version as a base for readers that join.

        Return its signed manifest. A delta of the same version may be published too.
        """
        updates = []
        with self._written() as put:
            for name in sorted(tensors):
                zeros = tensors[name].zeros()
                digest = digest_of(zeros.bits)
                updates.append(self._tensor(zeros, tensors[name], digest, Level.FAST, put))
        return self.publish_updates(version, version, tuple(updates))

    def publish_updates(
        self,
        version: int,
        parent: int,
        tensors: tuple[TensorUpdate, ...],
        origins: tuple[str, ...] = (),
    ) -> Manifest:
        """Sign and store a manifest of chunks that are durable already; return the manifest.

        `origins`: addresses of the stores of chunks that are elsewhere.
        """
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
            origins=origins,
            on_update=self._on_update,
            adapter=self.adapter,
        ).signed(self._key)
        self._store.put_manifest(manifest)
        self._known = version, manifest.digests
        return manifest

    def renew(self) -> tuple[int, ...]:
        """Sign the newest delta and base again if less than half of their lifetime remains.

        Return the versions that were renewed, often (): an expired manifest would keep new readers
        out, though its weights are the newest. Only this key's versions of this job are signed
        again. Raises SignatureError for another key's, ManifestError for another job's, StoreError.
        """
        kinds = (self._store.versions(), False), (self._store.bases(), True)
        newest = [(versions[-1], base) for versions, base in kinds if versions]
        return tuple(version for version, base in newest if self._renewed(version, base=base))

    def _renewed(self, version: int, *, base: bool) -> bool:
        manifest = self._store.find_manifest(version, base=base)
        now_s = self._clock()
        if manifest is None or manifest.expires_s - now_s > 0.5 * self._lifetime_s:
            return False
        manifest.verify(self._key.verify_key)
        if manifest.job != self._job:
            raise ManifestError(f"version {version} is of {manifest.job}, not of {self._job}")
        fresh = replace(manifest, created_s=now_s, expires_s=now_s + self._lifetime_s)
        self._store.put_manifest(fresh.signed(self._key))
        return True

    def _digests_of(self, version: int, tensors: Mapping[str, AnyTensor]) -> Mapping[str, int]:
        """Return the digest of each tensor of a version.

        Those of the last published one are cached. Raises WrongBaseError where other weights were
        published as that version: a trainer that resumed from another checkpoint would publish
        deltas that no reader can apply.
        """
        known, digests = self._known
        if known == version and digests.keys() == tensors.keys():
            return digests
        digests_now = {name: digest_of(tensor.bits) for name, tensor in tensors.items()}
        for base in (False, True):
            if published := self._store.find_manifest(version, base=base):
                self._check_held(published, digests_now)
        return digests_now

    def _check_held(self, published: Manifest, digests: Mapping[str, int]) -> None:
        if published.job != self._job:
            raise ManifestError(
                f"the store holds versions of {published.job}; give {self._job} one of its own"
            )
        for name, digest in published.digests.items():
            if digests.get(name, digest) != digest:
                raise WrongBaseError(
                    f"{name} is not what version {published.version} was published as;"
                    " go on from the weights that were restored, or publish a new base"
                )

    @contextmanager
    def _written(self) -> Iterator[Put]:
        """Return a context whose function stores chunks, small ones beside its caller; all of them
        are durable at its end.
        """
        pending: deque[Future[str]] = deque()
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="rose-chunks") as pool:

            def put(encoded: bytes) -> str:
                if len(encoded) > SMALL_BYTES:
                    return self._store.put(encoded)
                pending.append(pool.submit(self._store.put, encoded))
                if len(pending) > WRITERS:
                    pending.popleft().result()
                return chunk_id(encoded)

            yield put
            for each in pending:
                each.result()

    def _tensor(
        self, old: AnyTensor, new: AnyTensor, before: int, level: Level, put: Put
    ) -> TensorUpdate:
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise ManifestError(f"{old.name}: dtype or shape changed; publish a new base instead")
        encoded = (
            encode_chunk(old, new, rows, before, level)
            for rows in row_ranges(old, self._chunk_bytes)
        )
        return update_of(old, before, encoded, put)

"""Receiver: the sans-IO core of a replica's side.

decode  verified manifests + chunks → StagedUpdate, nothing written: expiry, base, every chunk,
        and every tensor's digest after each version are checked first
commit  overwrite with absolute values, then move the version: rerunning it is harmless
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from weight_transfer.errors import (
    ChunkFormatError,
    ChunkMissingError,
    DigestMismatchError,
    ManifestError,
    ManifestExpired,
    WrongBaseError,
)
from weight_transfer.format.chunk import check_id, decode_chunk, overwrite_chunk, parse_header
from weight_transfer.format.digest import MODULUS, after_write, digest_of
from weight_transfer.format.manifest import (
    CODEC,
    ChunkRef,
    Manifest,
    TensorUpdate,
    VerifiedManifest,
    hex_digest,
)
from weight_transfer.format.signing import VerifyKey
from weight_transfer.format.tensors import TensorBits, copy_tensors
from weight_transfer.kernels.cpu import apply_changes, compare, scatter
from weight_transfer.kernels.processor import Change


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """Verified change of one tensor, its indices ascending, and the tensor's digest after it."""

    name: str
    change: Change
    digest_after: int


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """Decoded and verified update from version `parent` to `version`, in memory, not applied yet.

    Only tensors that change are listed.
    """

    version: int
    parent: int
    tensors: tuple[StagedTensor, ...]
    wire_bytes: int
    job: str = ""

    @property
    def changed(self) -> int:
        return sum(tensor.change.indices.size for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Checked sequence of versions from `parent` to `version`, of which no chunk is decoded yet.

    `based`: True if the first one is a base. `tensors`: for each tensor name, sorted, its entries
    in the manifests, in their order.
    """

    version: int
    parent: int
    based: bool
    wire_bytes: int
    tensors: Mapping[str, tuple[TensorUpdate, ...]]
    job: str = ""

    def most_changed(self, name: str, elements: int) -> int:
        """Return an upper bound of the changed weights of a tensor that has `elements` weights."""
        listed = sum(chunk.changed for update in self.tensors[name] for chunk in update.chunks)
        return elements if self.based else min(elements, listed)

    def update(self, tensors: Iterable[StagedTensor]) -> StagedUpdate:
        """Return the update that consists of the plan's decoded tensors.

        Unchanged ones are left out.
        """
        changed = tuple(tensor for tensor in tensors if tensor.change.indices.size)
        return StagedUpdate(self.version, self.parent, changed, self.wire_bytes, self.job)


class WeightCopy(Protocol):
    """Copy of a checkpoint's tensors at one version, which `write` brings to another version."""

    @property
    def version(self) -> int:
        """Version of the weights that the checkpoint copy holds."""

    @property
    def tensors(self) -> Mapping[str, TensorBits]:
        """Tensors of the checkpoint copy by name, read-only."""

    @property
    def digests(self) -> Mapping[str, int]:
        """64-bit digest of each tensor of the checkpoint copy, by name."""

    def write(self, staged: Iterable[StagedTensor], version: int) -> None:
        """Write a staged update's new values, and move to `version`; doing it again is harmless."""


class PrivateCopy:
    """Copy of a checkpoint in this process's own memory."""

    def __init__(self, tensors: Mapping[str, TensorBits], version: int) -> None:
        self.tensors = copy_tensors(tensors)
        self.digests = {name: digest_of(t.bits) for name, t in self.tensors.items()}
        self.version = version

    def write(self, staged: Iterable[StagedTensor], version: int) -> None:
        """Write a staged update's new values, and move to `version`; doing it again is harmless."""
        for each in staged:
            scatter(self.tensors[each.name].bits, each.change.indices, each.change.new)
            self.digests[each.name] = each.digest_after
        self.version = version


class Receiver:
    """Receiver of versions on a copy of the checkpoint: it verifies, decodes and commits updates.

    `job`: job of the active version, "" for the model as it was started. From one job's weights
    only a base leads to those of another, since a version's number means nothing without its job.
    """

    def __init__(self, tensors: Mapping[str, TensorBits], version: int = 0) -> None:
        """Make a private copy of `tensors`, which are those of `version`, to receive on."""
        self._copy: WeightCopy = PrivateCopy(tensors, version)
        self.job = ""

    @classmethod
    def over(cls, copy: WeightCopy) -> Receiver:
        """Return a receiver that works on `copy` instead of a private one."""
        receiver = cls.__new__(cls)
        receiver._copy = copy
        receiver.job = ""
        return receiver

    @property
    def version(self) -> int:
        return self._copy.version

    @property
    def tensors(self) -> Mapping[str, TensorBits]:
        """Weights of the active version by tensor name, read-only."""
        return self._copy.tensors

    @property
    def digests(self) -> Mapping[str, int]:
        return self._copy.digests

    def decode(
        self,
        manifest: Manifest,
        chunks: Mapping[str, bytes],
        verify_key: VerifyKey | None,
        now_s: float,
    ) -> StagedUpdate:
        """Verify and decode one version; return the update, with the active version left as it is.

        `chunks` maps ids to encoded bytes; `now_s` is wall-clock. Without `verify_key` the
        signature is not checked. Raises the WeightError that names what is wrong.
        """
        return self.decode_chain([manifest], chunks, verify_key, now_s)

    def decode_chain(
        self,
        manifests: Sequence[Manifest],
        chunks: Mapping[str, bytes],
        verify_key: VerifyKey | None,
        now_s: float,
    ) -> StagedUpdate:
        """Verify and decode versions that follow each other, perhaps from a base on.

        Return one update. A weight that came back to its active value is not in it. Of the
        manifests only the last must not have expired.
        """
        checked = [VerifiedManifest.check(manifest, verify_key) for manifest in manifests]
        plan = self.plan(checked, now_s)
        return plan.update(self.decode_tensor(plan, name, chunks) for name in plan.tensors)

    def plan(self, verified: Sequence[VerifiedManifest], now_s: float) -> UpdatePlan:
        """Return the plan of an update: check expiry, order, jobs and tensors of the manifests.

        Chunks are not needed yet. Raises ManifestError, ManifestExpired, WrongBaseError.
        """
        if not verified:
            raise ManifestError("no version to decode; give at least one manifest")
        manifests = [each.manifest for each in verified]
        for manifest in manifests:
            self._check(manifest)
        last = manifests[-1]
        if now_s >= last.expires_s:
            raise ManifestExpired(f"version {last.version} expired; fetch the newest manifest")
        self._check_order(manifests)
        updates = [{tensor.name: tensor for tensor in m.tensors} for m in manifests]
        return UpdatePlan(
            version=last.version,
            parent=self.version,
            based=manifests[0].is_base,
            wire_bytes=sum(manifest.wire_bytes for manifest in manifests),
            tensors={
                name: tuple(update[name] for update in updates) for name in sorted(self.tensors)
            },
            job=last.job,
        )

    def decode_tensor(
        self, plan: UpdatePlan, name: str, chunks: Mapping[str, bytes]
    ) -> StagedTensor:
        """Return the verified change of one tensor of a plan; its chunks are looked up one by one.

        Raises the WeightError that names what is wrong.
        """
        updates, active, digest = plan.tensors[name], self.tensors[name], self.digests[name]
        if len(updates) == 1 and not plan.based:
            return _changed(active, digest, updates[0], chunks)
        # The active tensor stays as it is.
        bits = np.zeros_like(active.bits) if plan.based else active.bits.copy()
        scratch = TensorBits(name, active.dtype, active.shape, bits)
        after = digest_of(bits) if plan.based else digest
        for update in updates:
            after = overwritten(scratch, after, update, chunks)
        changes = compare(active.bits, bits, bits.size)
        assert changes is not None
        change = apply_changes(active.bits, changes.gaps, changes.codes)
        return StagedTensor(name, change, after)

    def commit(self, staged: StagedUpdate) -> None:
        """Make `staged` the active version; committing the active version again is a no-op.

        Raises WrongBaseError when it was decoded on another version.
        """
        if (staged.version, staged.job) == (self.version, self.job):
            return
        if staged.parent != self.version:
            raise WrongBaseError(
                f"decoded on version {staged.parent}, active is {self.version}; decode it again"
            )
        self._copy.write(staged.tensors, staged.version)
        self.job = staged.job

    def _check(self, manifest: Manifest) -> None:
        if manifest.codec != CODEC:
            raise ManifestError(f"codec {manifest.codec} is unknown here; {CODEC} is known")
        listed = {tensor.name for tensor in manifest.tensors}
        if listed != self.tensors.keys():
            odd = sorted(listed ^ self.tensors.keys())
            raise ManifestError(f"manifest and model differ in {len(odd)} tensors: {odd[:4]}")

    def _check_order(self, manifests: Sequence[Manifest]) -> None:
        active, job = self.version, manifests[0].job
        if any(manifest.job != job for manifest in manifests):
            raise ManifestError("versions of several jobs in one update; apply those of one job")
        if self.job not in ("", job) and not manifests[0].is_base:
            raise WrongBaseError(
                f"version {manifests[0].version} of {job} builds on {job}'s weights, active are"
                f" {self.job}'s; rebase"
            )
        for at, manifest in enumerate(manifests):
            newer = job != self.job or manifest.version > active
            if manifest.is_base and at == 0 and newer:
                pass
            elif manifest.parent != active or manifest.version <= manifest.parent:
                raise WrongBaseError(
                    f"version {manifest.version} builds on {manifest.parent}, active is "
                    f"{active}; apply the versions between, or rebase"
                )
            active = manifest.version


def _changed(
    old: TensorBits, digest: int, update: TensorUpdate, chunks: Mapping[str, bytes]
) -> StagedTensor:
    """Return the verified change that one version makes to a tensor, which stays as it is."""
    _check_base(old, digest, update)
    changes = [decode_chunk(_fetch(ref, chunks), old, digest) for ref in update.chunks]
    indices = np.concatenate([np.zeros(0, np.int64), *(c.indices for c in changes)])
    values = np.concatenate([old.bits[:0], *(c.new for c in changes)])
    replaced = np.concatenate([old.bits[:0], *(c.old for c in changes)])
    if any(ref.columns for ref in update.chunks):
        order = np.argsort(indices, kind="stable")  # Quick where it meets ascending runs.
        indices, values, replaced = indices[order], values[order], replaced[order]
    after = after_write(digest, old.bits, indices, values)
    _check_after(update, after)
    return StagedTensor(old.name, Change(indices, replaced, values), after)


def overwritten(
    tensor: TensorBits, digest: int, update: TensorUpdate, chunks: Mapping[str, bytes]
) -> int:
    """Apply one version to a tensor in place; return the tensor's verified digest after it.

    Raises the WeightError that names what is wrong; the tensor's content is then undefined.
    """
    _check_base(tensor, digest, update)
    growth = sum(overwrite_chunk(_fetch(ref, chunks), tensor, digest) for ref in update.chunks)
    after = (digest + growth) % MODULUS
    _check_after(update, after)
    return after


def _check_base(old: TensorBits, digest: int, update: TensorUpdate) -> None:
    if (update.dtype, update.shape) != (old.dtype, old.shape):
        raise ManifestError(f"{old.name}: manifest says {update.dtype} {update.shape}")
    if update.digest_before != hex_digest(digest):
        raise WrongBaseError(f"{old.name}: version was made for other weights; rebase first")


def _check_after(update: TensorUpdate, digest: int) -> None:
    if update.digest_after != hex_digest(digest):
        raise DigestMismatchError(f"{update.name}: decoded weights are not the published ones")


def _fetch(ref: ChunkRef, chunks: Mapping[str, bytes]) -> bytes:
    encoded = chunks.get(ref.id)
    if encoded is None:
        raise ChunkMissingError(f"chunk {ref.id} was not handed in; fetch it first")
    check_id(ref.id, encoded)
    header = parse_header(encoded)
    actual = header.ref(ref.id)
    if actual != replace(ref, origin=None):
        raise ChunkFormatError(f"chunk {ref.id} holds {actual}, its manifest says otherwise")
    return encoded

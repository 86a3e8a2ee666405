"""Restoration of a published version: its weights out of a store, bit for bit.

    base 8 ──δ──► 9 ──δ──► 10         from the store alone
    model  ──δ──► 1 ──δ──► 2          where it has no base yet: version 0 is the caller's

A trainer that starts again goes on from what it published last, which nobody else may have kept.
Every tensor is proved against its signed digests before and after each version, as receivers do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np

from weight_transfer.apply.receiver import overwritten
from weight_transfer.catalog import Catalog, FetchPlan
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.errors import CatalogError, ManifestError, WrongBaseError
from weight_transfer.format.digest import digest_of
from weight_transfer.format.manifest import TensorUpdate
from weight_transfer.format.tensors import WIDTHS, Bits, TensorBits, unsigned


def newest_version(store: ChunkStore) -> int | None:
    """Return the greatest version number in the store, whether or not its chunks are there.

    None if empty.
    """
    return max((*store.versions(), *store.bases()), default=None)


def way_to(catalog: Catalog, version: int, *, model: bool = False) -> FetchPlan:
    """Return the steps from a base, or from version 0, to a version.

    model: True if the weights of version 0 are at hand, so that deltas alone may lead there. Raises
    CatalogError when no base and no deltas do.
    """
    try:
        return catalog.plan(None, version)
    except CatalogError:
        if not model:
            raise
    return catalog.plan(0, version)


def restore(
    store: ChunkStore,
    version: int,
    model: Mapping[str, TensorBits] | None = None,
    threads: int = os.cpu_count() or 1,
) -> dict[str, TensorBits]:
    """Return all tensors of a published version by name, in memory of their own, rebuilt from a
    store.

    `model`: weights of version 0, needed where no base leads to the version; tensors of `model`
    that the versions do not name are left out. Each tensor is checked against its signed digests.
    Raises CatalogError, WrongBaseError when `model` has other weights, and DigestMismatchError,
    ChunkError, ManifestError or StoreError for damaged or missing parts.
    """
    plan = way_to(store.catalog(), version, model=model is not None)
    manifests = [store.get_manifest(step, base=base) for step, base in plan.steps]
    if not manifests:
        raise CatalogError("version 0 is the model itself; nothing of it was published")
    start = None if manifests[0].is_base else model
    by_name = [{tensor.name: tensor for tensor in each.tensors} for each in manifests]
    chunks = _StoredChunks(store)

    def replayed(name: str) -> TensorBits:
        missing = [
            each.version for each, at in zip(manifests, by_name, strict=True) if name not in at
        ]
        if missing:
            raise ManifestError(f"version {missing[0]} does not say what {name} is")
        updates = [tensors[name] for tensors in by_name]
        tensor = _begun(updates[0], start)
        digest = digest_of(tensor.bits)
        for update in updates:
            digest = overwritten(tensor, digest, update, chunks)
        return tensor

    with ThreadPoolExecutor(threads) as pool:
        return {tensor.name: tensor for tensor in pool.map(replayed, by_name[-1])}


def _begun(first: TensorUpdate, model: Mapping[str, TensorBits] | None) -> TensorBits:
    """Return a tensor as it is before the first step: zeros for a base, else the model's
    weights."""
    if model is None:
        bits: Bits = np.zeros(prod(first.shape), unsigned(WIDTHS[first.dtype]))
    elif first.name in model:
        bits = model[first.name].bits.copy()
    else:
        raise WrongBaseError(f"the model has no {first.name}; give the checkpoint of version 0")
    return TensorBits(first.name, first.dtype, first.shape, bits)


class _StoredChunks(Mapping[str, bytes]):
    """Encoded chunks of a store by name, each read from disk when it is looked up."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> bytes:
        return self._store.get(name)

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in self._store.chunks_dir.iterdir())

    def __len__(self) -> int:
        return sum(1 for _ in self)

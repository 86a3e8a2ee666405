"""Fetches one version: manifest, signature, then every chunk that is not here yet, verified."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rose.publish.hub import Hub
from weight_transfer import ChunkRef, ChunkStore, Manifest, ManifestExpired, VerifyKey

CHUNKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that is here: its manifest's file and the bytes that crossed the link."""

    manifest: Manifest
    manifest_path: Path
    wire_bytes: int


async def fetch_version(
    hub: Hub,
    url: str,
    job: str,
    version: int,
    verify_key: VerifyKey | None,
    on_reject: Callable[[str], None],
    hold: set[str],
    *,
    base: bool = False,
    on_the_way: bool = False,
) -> Fetched:
    """Bring a version of a job into the receiver's store.

    hold: takes the names of all files that the version needs, so that they are kept until used.
    on_reject is told the name of each chunk whose bytes did not match it (it is fetched again).
    base: all of the version instead of its step. on_the_way: to another version, so it may have
    expired.
    Raises FetchError after a bounded number of attempts, WeightError for a wrong manifest,
    StorageError when the disk refuses.
    """
    receiving = hub.receiving
    store = receiving.store
    manifest, size = await hub.manifest(job, version, url, verify_key, base=base)
    if not on_the_way and time.time() >= manifest.expires_s:
        raise ManifestExpired(
            f"version {version} of {job} expired; publish a newer one, or check this clock"
        )
    hold.update(ref.id for ref in manifest.chunks)
    hold.add(store.manifest_path(version, base=base).name)
    await receiving.work(partial(receiving.shelf.make_room, manifest))
    if hub.group is not None:
        # One that has all chunks comes too: the group can only go together.
        shared = partial(hub.obtain, on_reject=on_reject)
        size += await hub.group.bring(manifest, receiving, shared, on_reject)
    missing = await receiving.work(partial(_missing, store, manifest, on_reject))
    # What neighbours ask for has no part in this limit: they may be what this node waits for.
    gate = asyncio.Semaphore(CHUNKS_AT_ONCE)

    async def obtain(ref: ChunkRef) -> int:
        async with gate:
            return await hub.obtain(ref, on_reject)

    received = await asyncio.gather(*map(obtain, missing.values()))
    path = await receiving.work(partial(store.put_manifest, manifest))
    return Fetched(manifest, path, size + sum(received))


def _missing(
    store: ChunkStore, manifest: Manifest, on_reject: Callable[[str], None]
) -> dict[str, ChunkRef]:
    """Chunks that are not here, or not as their names say: disks err too."""
    missing = {}
    for ref in manifest.chunks:
        if store.mend(ref.id):
            on_reject(ref.id)
        if not store.has(ref.id):
            missing[ref.id] = ref
    return missing

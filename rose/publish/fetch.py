"""Fetches one version: manifest, signature, then every chunk that is not here yet, verified."""

import asyncio
import time
from collections.abc import Callable, Iterable
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
    with hub.keeping(version, base=base):
        manifest, size = await hub.manifest(job, version, url, verify_key, base=base)
        if not on_the_way and time.time() >= manifest.expires_s:
            raise ManifestExpired(
                f"version {version} of {job} expired; publish a newer one, or check this clock"
            )
        hold.update(ref.id for ref in manifest.chunks)
        hold.add(hub.receiving.store.manifest_path(version, base=base).name)
        received = await _chunks(hub, manifest, on_reject)
    path = await hub.receiving.work(partial(hub.receiving.store.put_manifest, manifest))
    return Fetched(manifest, path, size + received)


async def _chunks(hub: Hub, manifest: Manifest, on_reject: Callable[[str], None]) -> int:
    """Have all chunks of a kept manifest; returns the bytes that came for them."""
    receiving = hub.receiving
    await receiving.work(partial(receiving.shelf.make_room, manifest))
    size = 0
    if hub.group is not None:
        # One that has all chunks comes too: the group can only go together.
        shared = partial(hub.obtain, on_reject=on_reject)
        size = await hub.group.bring(manifest, receiving, shared, on_reject)
    missing = await receiving.work(partial(_missing, receiving.store, manifest, on_reject))
    return size + await _obtained(hub, missing.values(), on_reject)


async def _obtained(hub: Hub, refs: Iterable[ChunkRef], on_reject: Callable[[str], None]) -> int:
    """Have chunks, a few at once; returns the bytes that came for them.

    A task for each would be a quarter of a million, which the collector looks at all at once.
    """
    # What neighbours ask for has no part in this limit: they may be what this node waits for.
    left = iter(refs)

    async def some() -> int:
        size = 0
        for ref in left:
            size += await hub.obtain(ref, on_reject)
        return size

    tasks = [asyncio.create_task(some()) for _ in range(CHUNKS_AT_ONCE)]
    try:
        return sum(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # Of a version that lacks a chunk the others need not come now.
            task.cancel()


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

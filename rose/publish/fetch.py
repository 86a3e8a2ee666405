"""Fetches one version: manifest, signature, then every chunk that is not here yet, verified."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rose.publish.hub import Hub
from weight_transfer import ChunkRef, Manifest, VerifyKey

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
) -> Fetched:
    """Bring a version of a job into the receiver's store.

    hold: takes the names of all files that the version needs, so that they are kept until used.
    on_reject is told the name of each chunk whose bytes did not match it (it is fetched again).
    Raises FetchError after a bounded number of attempts, WeightError for a wrong manifest.
    """
    receiving = hub.receiving
    store = receiving.store
    manifest, size = await hub.manifest(job, version, url, verify_key)
    hold.update(ref.id for ref in manifest.chunks)
    hold.add(store.manifest_path(version).name)
    await receiving.work(partial(receiving.shelf.make_room, manifest))
    missing = {ref.id: ref for ref in manifest.chunks if not store.has(ref.id)}
    # What neighbours ask for has no part in this limit: they may be what this node waits for.
    gate = asyncio.Semaphore(CHUNKS_AT_ONCE)

    async def obtain(ref: ChunkRef) -> int:
        async with gate:
            return await hub.obtain(ref, on_reject)

    received = await asyncio.gather(*map(obtain, missing.values()))
    path = await receiving.work(partial(store.put_manifest, manifest))
    return Fetched(manifest, path, size + sum(received))

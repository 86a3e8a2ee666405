"""Fetches one version: manifest, signature, then every chunk that is not here yet, verified."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp

from rose.errors import RoseError
from rose.publish.receiving import Receiving
from weight_transfer import ChunkRef, ChunkStore, Manifest, VerifyKey, WeightError, chunk_id

PARALLEL_CONNECTIONS = 4
ATTEMPTS_PER_OBJECT = 4
RETRY_PAUSE_S = 0.1
MAX_MANIFEST_BYTES = 64 << 20
OBJECT_TIMEOUT_S = 120.0
SILENCE_TIMEOUT_S = 10.0


class FetchError(RoseError):
    """A version could not be fetched whole; what came stays and is not fetched again."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that is here: its manifest's file and the bytes that crossed the link."""

    manifest: Manifest
    manifest_path: Path
    wire_bytes: int


async def fetch_version(
    session: aiohttp.ClientSession,
    url: str,
    job: str,
    version: int,
    receiving: Receiving,
    verify_key: VerifyKey | None,
    on_reject: Callable[[str], None],
    hold: set[str],
) -> Fetched:
    """Bring a version of a job into the receiver's store.

    hold: takes the names of all files that the version needs, so that they are kept until used.
    on_reject is told the name of each chunk whose bytes did not match it (it is fetched again).
    Raises FetchError after a bounded number of attempts, WeightError for a wrong manifest.
    """
    link = _Link(session, receiving)
    store = receiving.store
    raw = await link.get(f"{url}/manifests/{version}", MAX_MANIFEST_BYTES)
    manifest = Manifest.from_json(raw)
    if verify_key is not None:
        manifest.verify(verify_key)
    if (manifest.job, manifest.version) != (job, version):
        raise FetchError(
            f"asked for version {version} of {job}, was given {manifest.version} of {manifest.job}"
        )
    hold.update(ref.id for ref in manifest.chunks)
    hold.add(store.manifest_path(version).name)
    await receiving.work(partial(receiving.shelf.make_room, manifest))
    missing = {ref.id: ref for ref in manifest.chunks if not store.has(ref.id)}
    gate = asyncio.Semaphore(PARALLEL_CONNECTIONS)
    sizes = await asyncio.gather(
        *(_fetch_chunk(link, url, ref, gate, on_reject) for ref in missing.values())
    )
    path = await receiving.work(partial(store.put_manifest, manifest))
    return Fetched(manifest, path, len(raw) + sum(sizes))


async def _fetch_chunk(
    link: "_Link",
    url: str,
    ref: ChunkRef,
    gate: asyncio.Semaphore,
    on_reject: Callable[[str], None],
) -> int:
    received = 0
    for _ in range(ATTEMPTS_PER_OBJECT):
        async with gate:
            encoded = await link.get(f"{url}/chunks/{ref.id}", ref.encoded_bytes)
        received += len(encoded)
        if await link.receiving.work(partial(_stored, link.receiving.store, ref.id, encoded)):
            return received
        on_reject(ref.id)
    raise FetchError(f"chunk {ref.id} arrived corrupt {ATTEMPTS_PER_OBJECT} times; check the link")


def _stored(store: ChunkStore, name: str, encoded: bytes) -> bool:
    """Store a chunk, unless these bytes are not the ones of that name."""
    if chunk_id(encoded) != name:
        return False
    store.put(encoded)
    return True


@dataclass(frozen=True, slots=True)
class _Link:
    """Where bytes come from, no faster than the receiver may take them."""

    session: aiohttp.ClientSession
    receiving: Receiving

    async def get(self, url: str, limit_bytes: int) -> bytes:
        failure: Exception | None = None
        slowest_s = PARALLEL_CONNECTIONS * self.receiving.seconds_for(limit_bytes)
        timeout = aiohttp.ClientTimeout(OBJECT_TIMEOUT_S + slowest_s, sock_read=SILENCE_TIMEOUT_S)
        for _ in range(ATTEMPTS_PER_OBJECT):
            try:
                async with self.session.get(url, timeout=timeout) as response:
                    if response.status == 200:
                        return await self._body(response, limit_bytes)
                    failure = WeightError(f"{url}: HTTP {response.status}")
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = error
            await asyncio.sleep(RETRY_PAUSE_S)
        raise FetchError(
            f"{url} cannot be fetched: {failure}; is the publisher alive?"
        ) from failure

    async def _body(self, response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
        """Never more than was announced, whatever the other side sends."""
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > limit_bytes:
                raise FetchError(
                    f"{response.url} sends more than {limit_bytes} bytes; check its source"
                )
            # What is not read stays with the sender: TCP passes the cap on.
            await self.receiving.arrived(len(part))
        return bytes(body)

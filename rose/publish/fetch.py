"""Fetches one version: manifest, signature, then every chunk that is not here yet, verified."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rose.errors import RoseError
from weight_transfer import ChunkRef, ChunkStore, Manifest, VerifyKey, WeightError, chunk_id

PARALLEL_CONNECTIONS = 4
ATTEMPTS_PER_OBJECT = 4
RETRY_PAUSE_S = 0.1
MAX_MANIFEST_BYTES = 64 << 20
OBJECT_TIMEOUT_S = 120.0
SILENCE_TIMEOUT_S = 10.0
_TIMEOUT = aiohttp.ClientTimeout(total=OBJECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)


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
    store: ChunkStore,
    verify_key: VerifyKey | None,
    on_reject: Callable[[str], None],
) -> Fetched:
    """Bring a version of a job into `store`.

    on_reject is told the name of each chunk whose bytes did not match it (it is fetched again).
    Raises FetchError after a bounded number of attempts, WeightError for a wrong manifest.
    """
    raw = await _get(session, f"{url}/manifests/{version}", MAX_MANIFEST_BYTES)
    manifest = Manifest.from_json(raw)
    if verify_key is not None:
        manifest.verify(verify_key)
    if (manifest.job, manifest.version) != (job, version):
        raise FetchError(
            f"asked for version {version} of {job}, was given {manifest.version} of {manifest.job}"
        )
    missing = {ref.id: ref for ref in manifest.chunks if not store.has(ref.id)}
    gate = asyncio.Semaphore(PARALLEL_CONNECTIONS)
    sizes = await asyncio.gather(
        *(_fetch_chunk(session, url, ref, store, gate, on_reject) for ref in missing.values())
    )
    path = await asyncio.to_thread(store.put_manifest, manifest)
    return Fetched(manifest, path, len(raw) + sum(sizes))


async def _fetch_chunk(
    session: aiohttp.ClientSession,
    url: str,
    ref: ChunkRef,
    store: ChunkStore,
    gate: asyncio.Semaphore,
    on_reject: Callable[[str], None],
) -> int:
    received = 0
    for _ in range(ATTEMPTS_PER_OBJECT):
        async with gate:
            encoded = await _get(session, f"{url}/chunks/{ref.id}", ref.encoded_bytes)
        received += len(encoded)
        if chunk_id(encoded) == ref.id:
            await asyncio.to_thread(store.put, encoded)
            return received
        on_reject(ref.id)
    raise FetchError(f"chunk {ref.id} arrived corrupt {ATTEMPTS_PER_OBJECT} times; check the link")


async def _get(session: aiohttp.ClientSession, url: str, limit_bytes: int) -> bytes:
    failure: Exception | None = None
    for _ in range(ATTEMPTS_PER_OBJECT):
        try:
            async with session.get(url, timeout=_TIMEOUT) as response:
                if response.status == 200:
                    return await _body(response, limit_bytes)
                failure = WeightError(f"{url}: HTTP {response.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            failure = error
        await asyncio.sleep(RETRY_PAUSE_S)
    raise FetchError(f"{url} cannot be fetched: {failure}; is the publisher alive?") from failure


async def _body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Never more than was announced, whatever the other side sends."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > limit_bytes:
            raise FetchError(
                f"{response.url} sends more than {limit_bytes} bytes; check its source"
            )
    return bytes(body)

"""Publishers, servers and readers of weights in one process."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rose.addresses import free_port
from rose.weight_distribution import Credentials, VersionServer
from weight_transfer import ChunkStore, Manifest, SigningKey, TensorBits, VersionPublisher
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, Fetched, fetch_version

KEY = SigningKey.from_hex("08" * 32)


def tensors(step: int, shape: tuple[int, int] = (64, 64)) -> dict[str, TensorBits]:
    """Return a model of one tensor `w`, of which every seventh weight is `step` ulps further."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, shape[0] * shape[1], dtype="<u2")
    bits[::7] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", shape, bits)}


def publisher(root: Path, *, job: str = "job", key: SigningKey = KEY) -> VersionPublisher:
    """Return a publisher of small chunks into a new store."""
    return VersionPublisher(ChunkStore(root), job, "trainer", key, chunk_bytes=1_024)


def published(
    root: Path, *, job: str = "job", key: SigningKey = KEY
) -> tuple[ChunkStore, Manifest]:
    """Return a store of version 1, and its manifest."""
    manifest = publisher(root, job=job, key=key).publish(1, 0, tensors(0), tensors(1))
    return ChunkStore(root), manifest


@asynccontextmanager
async def serving(
    server: VersionServer | ChunkStore, **options: Any
) -> AsyncIterator[VersionServer]:
    """Have a server, or one of a store with these options, listen."""
    if isinstance(server, ChunkStore):
        server = VersionServer(server, free_port(), **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def reading(
    folder: Path,
    members: Iterable[str] = (),
    *,
    me: str = "",
    credentials: Credentials | None = None,
    caps: Caps | None = None,
) -> AsyncIterator[ChunkFetcher]:
    """Have the fetcher of a node with a store in `folder`."""
    session = credentials.session() if credentials else aiohttp.ClientSession()
    async with session:
        limits = DownloadLimits(ChunkStore(folder), caps or Caps())
        fetcher = ChunkFetcher(session, limits, me, members)
        try:
            yield fetcher
        finally:
            await fetcher.close()
            fetcher.receiving.close()


async def fetched(
    fetcher: ChunkFetcher,
    url: str,
    version: int = 1,
    *,
    job: str = "job",
    key: SigningKey | None = KEY,
    rejected: list[str] | None = None,
    hold: set[str] | None = None,
    **options: bool,
) -> Fetched:
    """Fetch a version; `rejected` gets the names of chunks that arrived corrupt."""
    verify_key = None if key is None else key.verify_key
    on_reject = (lambda _: None) if rejected is None else rejected.append
    held = set() if hold is None else hold
    return await fetch_version(fetcher, url, job, version, verify_key, on_reject, held, **options)


async def obtained(fetchers: Iterable[ChunkFetcher], url: str, **options: Any) -> list[Fetched]:
    """Fetch version 1 with all fetchers at once."""
    return await asyncio.gather(*(fetched(fetcher, url, **options) for fetcher in fetchers))

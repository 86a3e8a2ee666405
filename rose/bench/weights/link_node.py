"""One side of the link benchmark, as a process of its own.

origin FOLDER URL            serve a store until standard input ends
receive FOLDER URL ORIGIN MEMBER…   say {"event":"up"}; on a line of input fetch version 1 as a
                             base and load it, then say {"event":"ready", …}
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from rose.publish import Caps, ChunkFetcher, DownloadLimits, VersionServer
from weight_transfer import ChunkStore, Manifest, Publisher, Receiver, SigningKey, TensorBits
from weight_transfer.format.tensors import WIDTHS, unsigned

JOB = "bench"


async def _origin(folder: Path, url: str) -> None:
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    server = VersionServer(ChunkStore(folder), address.port, host=address.hostname, insecure=True)
    await server.start()
    _say(event="up")
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


async def _receive(folder: Path, url: str, origin: str, members: Sequence[str]) -> None:
    store, port = ChunkStore(folder), urlsplit(url).port
    assert port
    async with aiohttp.ClientSession() as session:
        fetcher = ChunkFetcher(session, DownloadLimits(store, Caps()), url, members)
        fetcher.follow(JOB, origin, None)
        server = VersionServer(store, port, fetcher=fetcher)
        await server.start()
        await asyncio.to_thread(_warm_up)
        _say(event="up")
        await asyncio.to_thread(sys.stdin.readline)
        began_s = time.monotonic()
        manifest, size = await fetcher.manifest(JOB, 1, origin, None, base=True)
        received = await asyncio.gather(*(fetcher.obtain(ref) for ref in manifest.chunks))
        fetched_s = time.monotonic() - began_s
        await asyncio.to_thread(_load, store, manifest)
        ready_s = time.monotonic() - began_s
        _say(event="ready", received=size + sum(received), fetched_s=fetched_s, ready_s=ready_s)
        await asyncio.to_thread(sys.stdin.read)
        await fetcher.close()
        await server.close()


def _warm_up() -> None:
    """Kernels are compiled before: an engine that serves has used them at its start."""
    with tempfile.TemporaryDirectory(prefix="rose-warm-") as folder:
        store = ChunkStore(Path(folder))
        bits = np.arange(1 << 12, dtype="<u2")
        tensors = {"w": TensorBits("w", "bfloat16", (64, 64), bits)}
        publisher = Publisher(store, JOB, "bench", SigningKey.generate())
        _load(store, publisher.publish_base(1, tensors))


def _load(store: ChunkStore, manifest: Manifest) -> None:
    """Decode, prove and commit all of it."""
    blank = {
        t.name: TensorBits(
            t.name, t.dtype, t.shape, np.zeros(_size(t.shape), unsigned(WIDTHS[t.dtype]))
        )
        for t in manifest.tensors
    }
    receiver = Receiver(blank)
    chunks = {ref.id: store.get(ref.id) for ref in manifest.chunks}
    receiver.commit(receiver.decode(manifest, chunks, None, time.time()))


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> None:
    """Run one node until its parent has heard all."""
    role, folder, url, *rest = words
    if role == "origin":
        asyncio.run(_origin(Path(folder), url))
    else:
        asyncio.run(_receive(Path(folder), url, rest[0], rest[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])

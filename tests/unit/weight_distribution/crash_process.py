"""One side of a cluster as a process of its own, to be killed by SIGKILL.

origin FOLDER URL             publish version 1 unless it is there, then serve it
member FOLDER URL ORIGIN URL… fetch version 1 and say "whole" on standard output, then serve on
"""

import asyncio
import sys
from pathlib import Path
from urllib.parse import urlsplit

from cluster_cases import CHUNK_BYTES, tensors

from rose.weight_distribution import VersionServer
from tests.harness.weight_peers import KEY, fetched, reading
from weight_transfer import ChunkStore, VersionPublisher, WeightError
from weight_transfer.fetch import Caps

LINK_BYTES_PER_S = 400_000


async def origin(folder: Path, url: str) -> None:
    store = ChunkStore(folder)
    if 1 not in store.versions():
        publisher = VersionPublisher(store, "job", "trainer", KEY, chunk_bytes=CHUNK_BYTES)
        publisher.publish(1, 0, tensors(0), tensors(1))
    server = VersionServer(store, urlsplit(url).port or 0)
    await server.start()
    say("up")
    await asyncio.Event().wait()


async def member(folder: Path, url: str, at: str, members: list[str]) -> None:
    caps = Caps(bytes_per_s=LINK_BYTES_PER_S)
    async with reading(folder, members, me=url, caps=caps) as fetcher:
        port = urlsplit(url).port or 0
        await VersionServer(fetcher.receiving.store, port, fetcher=fetcher).start()
        say("up")
        while True:
            try:
                await fetched(fetcher, at)
            except WeightError:
                await asyncio.sleep(0.05)
            else:
                break
        say("whole")
        await asyncio.Event().wait()


def say(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    role, folder, url, *rest = sys.argv[1:]
    if role == "origin":
        asyncio.run(origin(Path(folder), url))
    else:
        asyncio.run(member(Path(folder), url, rest[0], rest[1:]))

"""A base across a shaped link, to several receivers on the other side of it.

    origin namespace ──veth, tbf──► cluster namespace (receivers talk to each other over its lo)

Needs root and iproute2. Everything is removed at the end; nothing outside the namespaces changes.
Each side is a process, `python -m bench.weights.link`:

origin FOLDER URL            serve a store until standard input ends
publish FOLDER URL SEED COUNT  on a line of input publish a base at that address or in that bucket
receive FOLDER URL ORIGIN MEMBER…   write {"event":"up"}; on a line of input fetch version 1 as a
                             base and load it, then write {"event":"ready", …}
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from bench.common.processes import BenchProcess, python
from bench.weights.ranks import compile_kernels
from rose.addresses import is_bucket
from rose.weight_distribution import Credentials, VersionServer
from weight_transfer import ChunkStore, Manifest, Receiver, SigningKey, TensorBits, VersionPublisher
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits
from weight_transfer.format.tensors import WIDTHS, unsigned
from weight_transfer.publish.bucket_copy import BucketCopy

JOB = "bench"
ORIGIN_ADDRESS, CLUSTER_ADDRESS = "10.231.77.1", "10.231.77.2"
_BURST_BYTES = 262_144
_QUEUE_MS = 50
# Slow enough that the cores of one small machine can play the machines on both sides of it.
MBIT, DELAY_MS, LOSS_PERCENT = 25, 20, 0.1
RECEIVERS = (1, 4, 8)
TENSORS, ROWS, COLUMNS = 16, 1_024, 1_024
CHUNK_BYTES = 1 << 20
PORT = 18_900


async def _served(folder: Path, url: str) -> VersionServer:
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    server = VersionServer(
        ChunkStore(folder),
        address.port,
        credentials=Credentials(insecure=True),
        host=address.hostname,
    )
    await server.start()
    return server


async def _origin(folder: Path, url: str) -> None:
    server = await _served(folder, url)
    _write(event="up")
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


async def _publish(folder: Path, url: str, seed: int, count: int) -> None:
    key = SigningKey.generate()
    publisher = publisher_of(folder, key)
    encode = partial(publisher.publish_base, 1, random_tensors(seed, count))
    async with AsyncExitStack() as stack:
        if is_bucket(url):
            copy = BucketCopy(publisher.store, url, JOB, key)
            await copy.start()
        else:
            stack.push_async_callback((await _served(folder, url)).close)
        await asyncio.to_thread(compile_kernels)
        _write(event="up")
        await asyncio.to_thread(sys.stdin.readline)
        began_s = time.monotonic()
        if is_bucket(url):
            manifest = await copy.during(encode)
            encoded_s = time.monotonic() - began_s
            await copy.publish()
        else:
            manifest = await asyncio.to_thread(encode)
            encoded_s = time.monotonic() - began_s
        size = manifest.wire_bytes + manifest.size
        _write(event="published", encoded_bytes=size, encoded_s=encoded_s)
        await asyncio.to_thread(sys.stdin.read)


async def _receive(folder: Path, url: str, origin: str, members: Sequence[str]) -> None:
    store, port = ChunkStore(folder), urlsplit(url).port
    assert port
    session = Credentials(insecure=True).sources([origin] if is_bucket(origin) else ())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(session.close)
        fetcher = ChunkFetcher(session, DownloadLimits(store, Caps()), url, members)
        fetcher.follow(JOB, origin, None)
        server = VersionServer(store, port, fetcher=fetcher)
        await server.start()
        await asyncio.to_thread(compile_kernels)
        _write(event="up")
        await asyncio.to_thread(sys.stdin.readline)
        began_s = time.monotonic()
        manifest, size = await fetcher.manifest(JOB, 1, origin, None, base=True)
        received = await asyncio.gather(*(fetcher.obtain(ref) for ref in manifest.chunks))
        fetched_s = time.monotonic() - began_s
        await asyncio.to_thread(load, store, manifest)
        ready_s = time.monotonic() - began_s
        _write(event="ready", received=size + sum(received), fetched_s=fetched_s, ready_s=ready_s)
        await asyncio.to_thread(sys.stdin.read)
        await fetcher.close()
        await server.close()


def load(store: ChunkStore, manifest: Manifest) -> None:
    """Decode, prove and commit all of a base."""
    blank = {
        t.name: TensorBits(
            t.name, t.dtype, t.shape, np.zeros(prod(t.shape), unsigned(WIDTHS[t.dtype]))
        )
        for t in manifest.tensors
    }
    receiver = Receiver(blank)
    chunks = {ref.id: store.get(ref.id) for ref in manifest.chunks}
    receiver.commit(receiver.decode(manifest, chunks, None, time.time()))


def _write(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> None:
    role, folder, url, *rest = words
    if role == "origin":
        asyncio.run(_origin(Path(folder), url))
    elif role == "publish":
        asyncio.run(_publish(Path(folder), url, *map(int, rest)))
    else:
        asyncio.run(_receive(Path(folder), url, rest[0], rest[1:]))


class LinkUnavailableError(Exception):
    """This machine cannot shape a link; the message says why."""


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """Namespaces `origin` and `cluster`; `delayed`: the kernel could delay and lose packets."""

    origin: str
    cluster: str
    delayed: bool
    interface: str

    def inside(self, namespace: str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` in a namespace."""
        return ["ip", "netns", "exec", namespace, *argv]

    def sent_bytes(self) -> int:
        """Return bytes of all packets that left the origin so far."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        found = _tool(self.inside(self.origin, ["cat", path]))
        return int(found.stdout)


@contextmanager
def shaped_link(mbit: int, delay_ms: int, loss_percent: float) -> Iterator[ShapedLink]:
    """Make a link of this speed; delay (there and back) and loss where the kernel has netem.

    Raises LinkUnavailableError.
    """
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise LinkUnavailableError("a shaped link needs root, ip and tc")
    number = os.getpid()
    origin, cluster = f"rose-o-{number}", f"rose-c-{number}"
    one, other = f"ro{number}", f"rc{number}"
    made: list[str] = []
    try:
        for namespace in (origin, cluster):
            _must("ip", "netns", "add", namespace)
            made.append(namespace)
            _must("ip", "-n", namespace, "link", "set", "lo", "up")
        _must("ip", "link", "add", one, "netns", origin, "type", "veth", "peer", "name", other,
              "netns", cluster)  # fmt: skip
        delayed = True
        for namespace, interface, address in (
            (origin, one, ORIGIN_ADDRESS),
            (cluster, other, CLUSTER_ADDRESS),
        ):
            _must("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", interface)
            _must("ip", "-n", namespace, "link", "set", interface, "up")
            tc = ["tc", "-n", namespace, "qdisc", "add", "dev", interface]
            rate = ["tbf", "rate", f"{mbit}mbit", "burst", str(_BURST_BYTES), "latency",
                    f"{_QUEUE_MS}ms"]  # fmt: skip
            _must(*tc, "root", "handle", "1:", *rate)
            netem = ["netem", "delay", f"{delay_ms / 2}ms", "loss", f"{loss_percent}%"]
            delayed &= _tool([*tc, "parent", "1:1", "handle", "10:", *netem]).returncode == 0
        yield ShapedLink(origin, cluster, delayed, one)
    finally:
        for namespace in made:
            _tool(["ip", "netns", "delete", namespace])


def _must(*argv: str) -> None:
    done = _tool(argv)
    if done.returncode:
        raise LinkUnavailableError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _tool(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603 -- ip and tc


def link_figures(seed: int) -> dict[str, object]:
    """Return a row for each number of receivers, or the reason of having none."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="rose-link-") as folder,
            shaped_link(MBIT, DELAY_MS, LOSS_PERCENT) as link,
        ):
            publisher = publisher_of(Path(folder) / "origin", SigningKey.generate())
            manifest = publisher.publish_base(1, random_tensors(seed))
            rows = [_run(link, Path(folder), manifest, count) for count in RECEIVERS]
            shape = {"mbit": MBIT, "delay_ms": DELAY_MS, "loss_percent": LOSS_PERCENT}
            if not link.delayed:
                shape = {"mbit": MBIT, "delay_ms": 0, "loss_percent": 0}
            return {"link": shape, "netem": link.delayed, "rows": rows}
    except LinkUnavailableError as error:
        return {"skipped": str(error)}


def random_tensors(seed: int, count: int = TENSORS) -> dict[str, TensorBits]:
    """Return `count` tensors of 2 MiB, which hardly compress."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for number in range(count):
        name = f"layers.{number}.weight"
        bits = rng.integers(0, 1 << 16, ROWS * COLUMNS, dtype="<u2")
        tensors[name] = TensorBits(name, "bfloat16", (ROWS, COLUMNS), bits)
    return tensors


def publisher_of(root: Path, key: SigningKey) -> VersionPublisher:
    return VersionPublisher(ChunkStore(root), JOB, "bench", key, chunk_bytes=CHUNK_BYTES)


def _run(link: ShapedLink, folder: Path, manifest: Manifest, count: int) -> dict[str, object]:
    origin = f"http://{ORIGIN_ADDRESS}:{PORT}"
    members = [f"http://127.0.0.1:{PORT + 1 + n}" for n in range(count)]
    with ExitStack() as stack:
        started(stack, link, link.origin, "origin", folder / "origin", origin)
        receivers = [
            started(
                *(stack, link, link.cluster, "receive"),
                *(folder / f"{count}-{n}", member, origin, *members),
            )
            for n, member in enumerate(members)
        ]
        before, began_s = link.sent_bytes(), time.monotonic()
        for receiver in receivers:
            receiver.write(b"go")
        ready = [receiver.event("ready") for receiver in receivers]
        ready_s, sent = time.monotonic() - began_s, link.sent_bytes() - before
    encoded = manifest.wire_bytes + manifest.size
    link_s = encoded * 8 / (MBIT * 1e6)
    fetched_s = max(one["fetched_s"] for one in ready)
    return {
        "receivers": count,
        "encoded_bytes": encoded,
        "link_bytes": sent,
        "received_bytes": sum(one["received"] for one in ready),
        "link_s": link_s,
        "fetched_s": fetched_s,
        "ready_s": ready_s,
        "link_bytes_over_encoded": sent / encoded,
        "goodput_of_link": link_s / fetched_s,
        "ready_over_link": ready_s / link_s,
    }


def started(
    stack: ExitStack, link: ShapedLink, namespace: str, role: str, *words: object
) -> BenchProcess:
    argv = link.inside(namespace, python("bench.weights.link", role, *words))
    node = stack.enter_context(BenchProcess(f"{role} of the link", argv, piped=True))
    node.event("up")
    return node


if __name__ == "__main__":
    main(sys.argv[1:])

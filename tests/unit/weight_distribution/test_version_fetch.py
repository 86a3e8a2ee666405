"""A version arrives whole or not at all, over real HTTP."""

from pathlib import Path

import aiohttp
import numpy as np
import pytest

from bench.demo.faulty_trainer import CorruptServer
from rose.addresses import free_port
from rose.weight_distribution import VersionServer
from weight_transfer import (
    ChunkStore,
    Manifest,
    SignatureError,
    SigningKey,
    TensorBits,
    VersionPublisher,
)
from weight_transfer.errors import FetchError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, fetch_version


def _tensors(step: int) -> dict[str, TensorBits]:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, size=4_096, dtype=np.uint16)
    bits[::7] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


def _publish(root: Path, key: SigningKey) -> Manifest:
    publisher = VersionPublisher(ChunkStore(root), "job", "trainer", key, chunk_bytes=1_024)
    return publisher.publish(1, 0, _tensors(0), _tensors(1))


def _lengthen(root: Path) -> None:
    """Each chunk's file is longer than its manifest says."""
    for path in (root / "chunks").iterdir():
        path.write_bytes(path.read_bytes() + bytes(1 << 20))


async def test_a_corrupted_chunk_is_noticed_and_fetched_again(tmp_path: Path) -> None:
    key = SigningKey.generate()
    manifest = _publish(tmp_path / "from", key)
    server = CorruptServer(ChunkStore(tmp_path / "from"), free_port())
    server.every = 2
    rejected: list[str] = []
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            receiving = DownloadLimits(ChunkStore(tmp_path / "to"), Caps())
            fetched = await fetch_version(
                ChunkFetcher(session, receiving),
                server.url,
                "job",
                1,
                key.verify_key,
                rejected.append,
                set(),
            )
    finally:
        await server.close()
    assert rejected, "the control corrupts some chunks"
    assert all(receiving.store.has(ref.id) for ref in manifest.chunks)
    assert fetched.wire_bytes > manifest.wire_bytes


async def test_a_manifest_of_another_trainer_is_refused(tmp_path: Path) -> None:
    _publish(tmp_path / "from", SigningKey.generate())
    server = VersionServer(ChunkStore(tmp_path / "from"), free_port())
    stranger = SigningKey.generate().verify_key
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            receiving = DownloadLimits(ChunkStore(tmp_path / "to"), Caps())
            with pytest.raises(SignatureError):
                await fetch_version(
                    ChunkFetcher(session, receiving),
                    server.url,
                    "job",
                    1,
                    stranger,
                    lambda _: None,
                    set(),
                )
    finally:
        await server.close()


async def test_a_version_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    server = VersionServer(ChunkStore(tmp_path / "from"), free_port())
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            receiving = DownloadLimits(ChunkStore(tmp_path / "to"), Caps())
            with pytest.raises(FetchError, match="cannot be fetched"):
                await fetch_version(
                    ChunkFetcher(session, receiving),
                    server.url,
                    "job",
                    9,
                    None,
                    lambda _: None,
                    set(),
                )
    finally:
        await server.close()


class JoblessStore(ChunkStore):
    """Store that serves whichever version has the number."""

    def manifest_bytes(self, job: str, version: int, *, base: bool = False) -> bytes | None:
        return super().manifest_bytes("", version, base=base)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (ChunkStore, "HTTP 404"),
        (JoblessStore, "version 1 of mine, was given one of job"),
    ],
    ids=["a server that knows jobs", "one that does not"],
)
async def test_a_version_of_another_job_is_refused(
    tmp_path: Path, store: type[ChunkStore], said: str
) -> None:
    key = SigningKey.generate()
    _publish(tmp_path / "from", key)
    server = VersionServer(store(tmp_path / "from"), free_port())
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            receiving = DownloadLimits(ChunkStore(tmp_path / "to"), Caps())
            with pytest.raises(FetchError, match=said):
                await fetch_version(
                    ChunkFetcher(session, receiving),
                    server.url,
                    "mine",
                    1,
                    key.verify_key,
                    lambda _: None,
                    set(),
                )
    finally:
        await server.close()


async def test_a_publisher_that_sends_more_than_it_announced_is_cut_off(
    tmp_path: Path,
) -> None:
    key = SigningKey.generate()
    _publish(tmp_path / "from", key)
    server = VersionServer(ChunkStore(tmp_path / "from"), free_port())
    _lengthen(tmp_path / "from")
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            receiving = DownloadLimits(ChunkStore(tmp_path / "to"), Caps())
            with pytest.raises(FetchError, match="sends more than"):
                await fetch_version(
                    ChunkFetcher(session, receiving),
                    server.url,
                    "job",
                    1,
                    key.verify_key,
                    lambda _: None,
                    set(),
                )
    finally:
        await server.close()

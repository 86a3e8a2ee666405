"""A version comes once to a fixed group, whatever its members do; NCCL itself needs GPUs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from group_cases import StandInCommunicator, stand_in_group

from rose.addresses import free_port
from rose.weight_distribution import VersionServer
from weight_transfer import ChunkStore, Manifest, SigningKey, TensorBits, VersionPublisher
from weight_transfer.errors import FetchError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, fetch_version
from weight_transfer.fetch.nccl import (
    Fanout,
    FixedGroup,
    Lead,
    LocalBarrier,
    Membership,
    RemoteBarrier,
    join_group,
)

SIZE = 3


def _tensors(step: int) -> dict[str, TensorBits]:
    bits = np.random.default_rng(0).integers(0, 1 << 16, size=16_384, dtype=np.uint16)
    bits[::7] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", (128, 128), bits)}


@dataclass
class Member:
    """One node: its store, its fetcher, its place in the group."""

    fetcher: ChunkFetcher
    communicator: StandInCommunicator
    rejected: list[str] = field(default_factory=list)

    @property
    def group(self) -> FixedGroup:
        assert self.fetcher.group is not None
        return self.fetcher.group

    async def fetch(self, url: str, version: int) -> int:
        """Bytes of chunks that came over HTTP."""
        fetched = await fetch_version(
            self.fetcher, url, "job", version, None, self.rejected.append, set()
        )
        _, size = await self.fetcher.manifest("job", version, url, None)
        assert size == 0, "it is known by now"
        return fetched.wire_bytes - len(fetched.manifest.to_bytes())

    def has(self, manifest: Manifest) -> bool:
        return all(self.fetcher.receiving.store.sound(ref.id) for ref in manifest.chunks)


@dataclass
class Cluster:
    """A publisher, and members of which the first leads."""

    url: str
    publisher: VersionPublisher
    members: list[Member]

    def publish(self, version: int) -> Manifest:
        old, new = _tensors(version - 1), _tensors(version)
        return self.publisher.publish(version, version - 1, old, new)


@asynccontextmanager
async def cluster(
    root: Path, *, flip: bool = False, chunk_s: float = 10.0
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        store = ChunkStore(root / "from")
        leading = Lead((1, 2, 3), LocalBarrier(SIZE, wait_s=0.5))
        server = VersionServer(store, free_port(), lead=leading)
        await server.start()
        stack.push_async_callback(server.close)
        members = []
        for communicator in stand_in_group(SIZE, flip=flip):
            receiving = DownloadLimits(ChunkStore(root / str(communicator.rank)), Caps())
            fetcher = ChunkFetcher(session, receiving)
            barrier: Any = RemoteBarrier(session, server.url)
            barrier = leading.barrier if communicator.rank == 0 else barrier
            fetcher.group = FixedGroup(Fanout(communicator), barrier, chunk_s)
            stack.callback(receiving.close)
            stack.push_async_callback(fetcher.close)
            members.append(Member(fetcher, communicator))
        publisher = VersionPublisher(
            store, "job", "trainer", SigningKey.generate(), chunk_bytes=1_024
        )
        yield Cluster(server.url, publisher, members)


async def test_each_chunk_comes_once_to_the_group_and_is_everywhere(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        for version in (1, 2):
            manifest = here.publish(version)
            came = await asyncio.gather(*(m.fetch(here.url, version) for m in here.members))
            assert all(member.has(manifest) for member in here.members)
            assert sum(came) == manifest.wire_bytes
            assert sum(size > 0 for size in came) > 1, "members share the link's work"
        assert not any(member.group.broken for member in here.members)


async def test_who_does_not_come_keeps_nobody_and_the_next_version_goes_together(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as here:
        manifest = here.publish(1)
        first, second, late = here.members
        came = await asyncio.gather(first.fetch(here.url, 1), second.fetch(here.url, 1))
        assert came == [manifest.wire_bytes] * 2
        assert first.communicator.broadcasts == 0
        assert await late.fetch(here.url, 1) == manifest.wire_bytes
        manifest = here.publish(2)
        came = await asyncio.gather(*(m.fetch(here.url, 2) for m in here.members))
        assert sum(came) == manifest.wire_bytes


@pytest.mark.parametrize("dies_after", [0, 1, 2, 5])
async def test_a_member_that_dies_on_the_way_costs_the_group_and_no_version(
    tmp_path: Path, dies_after: int
) -> None:
    async with cluster(tmp_path, chunk_s=1.0) as here:
        here.members[1].communicator.dies_after = dies_after
        manifest = here.publish(1)
        came = await asyncio.gather(*(m.fetch(here.url, 1) for m in here.members))
        assert all(member.has(manifest) for member in here.members)
        assert all(member.group.broken for member in here.members)
        assert max(came) <= manifest.wire_bytes, "what came is not fetched again"
        manifest = here.publish(2)
        came = await asyncio.gather(*(m.fetch(here.url, 2) for m in here.members))
        assert came == [manifest.wire_bytes] * SIZE, "each for itself from now on"


async def test_what_its_owner_cannot_get_the_others_get_themselves(tmp_path: Path) -> None:
    async with cluster(tmp_path) as here:
        manifest = here.publish(1)
        poor = here.members[2]
        failed: list[str] = []
        obtain = poor.fetcher.obtain

        async def failing(ref: Any, on_reject: Any) -> int:
            if len(failed) < 3 and ref.id not in failed:
                failed.append(ref.id)
                raise FetchError("nobody has it")
            return await obtain(ref, on_reject)

        poor.fetcher.obtain = failing  # type: ignore[method-assign]
        came = await asyncio.gather(*(m.fetch(here.url, 1) for m in here.members))
        assert len(failed) == 3
        assert all(member.has(manifest) for member in here.members)
        assert sum(came) > manifest.wire_bytes
        assert not any(member.group.broken for member in here.members)


async def test_a_chunk_that_arrives_corrupt_is_fetched_again_over_http(tmp_path: Path) -> None:
    async with cluster(tmp_path, flip=True) as here:
        manifest = here.publish(1)
        await asyncio.gather(*(m.fetch(here.url, 1) for m in here.members))
        assert all(member.has(manifest) for member in here.members)
        assert all(member.rejected for member in here.members)


async def test_members_join_under_the_leaders_name_whenever_it_comes_up(tmp_path: Path) -> None:
    made: list[tuple[Any, ...]] = []

    def make(rank: int, size: int, name: tuple[int, ...], device: int) -> StandInCommunicator:
        made.append((rank, size, name, device))
        return stand_in_group(size)[rank]

    port = free_port()
    leading = Lead((7, 8), LocalBarrier(2))
    server = VersionServer(ChunkStore(tmp_path), port, lead=leading)
    async with aiohttp.ClientSession() as session:
        join = partial(join_group, session, make=make)
        joining = asyncio.create_task(join(Membership(1, 2, server.url, device=3)))
        await asyncio.sleep(0.1)
        await server.start()
        try:
            groups = [await join(Membership(0, 2, ""), leading), await joining]
        finally:
            await server.close()
    assert made == [(0, 2, (7, 8), 0), (1, 2, (7, 8), 3)]
    for group in groups:
        group.close()
        assert group.broken


async def test_a_node_that_leads_no_group_says_so(tmp_path: Path) -> None:
    server = VersionServer(ChunkStore(tmp_path), free_port())
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            assert not await RemoteBarrier(session, server.url).join("0" * 64, 1)
    finally:
        await server.close()

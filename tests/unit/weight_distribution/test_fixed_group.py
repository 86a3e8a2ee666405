"""A version comes once to a fixed group, whatever its members do; threads stand for GPUs."""

import asyncio
import importlib.util
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray

from rose.addresses import free_port
from rose.weight_distribution import VersionServer
from tests.harness.weight_peers import fetched, publisher, reading, serving, tensors
from weight_transfer import ChunkDigestError, ChunkStore, Manifest, VersionPublisher, chunk_id
from weight_transfer.errors import FanoutError, FetchError
from weight_transfer.fetch import ChunkFetcher
from weight_transfer.fetch.nccl import (
    FixedGroup,
    GroupLead,
    LocalBarrier,
    Membership,
    NcclCommunicator,
    RemoteBarrier,
    hand,
    join_group,
)

SIZE = 3


class StandInLinks:
    """State that a group's members share. `flip`: one bit changes on the way to others."""

    def __init__(self, size: int, flip: bool = False) -> None:
        self.size = size
        self.flip = flip
        self.barrier = threading.Barrier(size)
        self.body: NDArray[np.uint8] = np.zeros(0, np.uint8)


class StandInCommunicator:
    """One member. `dies_after`: so many broadcasts; what follows it leaves the others waiting."""

    def __init__(self, rank: int, links: StandInLinks) -> None:
        self.rank, self.size = rank, links.size
        self.links = links
        self.dies_after: int | None = None
        self.broadcasts = 0

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        if self.broadcasts == self.dies_after:
            raise RuntimeError("the GPU has fallen off the bus")
        self.broadcasts += 1
        links = self.links
        if self.rank == root:
            links.body = body
        links.barrier.wait(20)
        got = links.body.copy()
        assert got.size == body.size, "members make different calls"
        if links.flip and self.rank != root and got.size > 8:
            got[got.size // 2] ^= 1
        links.barrier.wait(20)
        return got

    def abort(self) -> None:
        self.links.barrier.abort()


def stand_in_group(size: int, *, flip: bool = False) -> list[StandInCommunicator]:
    """Return all members of one group."""
    links = StandInLinks(size, flip)
    return [StandInCommunicator(rank, links) for rank in range(size)]


def handed(members: list[StandInCommunicator], name: str, body: bytes | None, root: int) -> list:
    """Return what each member has, or raises, once all have made the call."""
    with ThreadPoolExecutor(len(members)) as pool:
        calls = [
            pool.submit(hand, member, name, body if member.rank == root else None, root)
            for member in members
        ]
        return [call.exception(5) or call.result() for call in calls]


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("body", [b"", b"x" * 100_003])
def test_every_member_has_the_chunk(root: int, body: bytes) -> None:
    assert handed(stand_in_group(3), chunk_id(body), body, root) == [body] * 3


def test_what_does_not_arrive_whole_is_nobodys_chunk() -> None:
    body = bytes(1_000)
    first, other = handed(stand_in_group(2, flip=True), chunk_id(body), body, 0)
    assert first == body
    assert isinstance(other, ChunkDigestError), "a bit flipped on the way"
    assert handed(stand_in_group(2), "00" * 32, None, 0) == [None, None], "its root has none"
    with pytest.raises(FanoutError, match="only the root of a fan-out"):
        hand(stand_in_group(2)[1], "00" * 32, b"x", 0)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is here")
def test_without_cupy_it_says_what_to_do() -> None:
    with pytest.raises(FanoutError, match="share over HTTP"):
        NcclCommunicator.new_id()


@dataclass
class GroupMember:
    """One node: its fetcher, its place in the group."""

    fetcher: ChunkFetcher
    communicator: StandInCommunicator
    rejected: list[str] = field(default_factory=list)

    @property
    def group(self) -> FixedGroup:
        assert self.fetcher.group is not None
        return self.fetcher.group

    async def fetch(self, url: str, version: int) -> int:
        """Return the bytes of chunks that came over HTTP."""
        found = await fetched(self.fetcher, url, version, key=None, rejected=self.rejected)
        _, size = await self.fetcher.manifest("job", version, url, None)
        assert size == 0, "it is known by now"
        return found.wire_bytes - len(found.manifest.to_bytes())

    def has(self, manifest: Manifest) -> bool:
        return all(self.fetcher.receiving.store.sound(ref.id) for ref in manifest.chunks)


@dataclass
class Group:
    """A publisher, and members of which the first leads."""

    url: str
    publisher: VersionPublisher
    members: list[GroupMember]

    def publish(self, version: int) -> Manifest:
        old, new = (tensors(each, (128, 128)) for each in (version - 1, version))
        return self.publisher.publish(version, version - 1, old, new)

    async def fetch(self, version: int) -> list[int]:
        return await asyncio.gather(*(m.fetch(self.url, version) for m in self.members))

    def has(self, manifest: Manifest) -> bool:
        return all(member.has(manifest) for member in self.members)


@asynccontextmanager
async def group(root: Path, *, flip: bool = False, chunk_s: float = 10.0) -> AsyncIterator[Group]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        leading = GroupLead((1, 2, 3), LocalBarrier(SIZE, wait_s=0.5))
        server = await stack.enter_async_context(serving(ChunkStore(root / "from"), lead=leading))
        members = []
        for communicator in stand_in_group(SIZE, flip=flip):
            rank = communicator.rank
            fetcher = await stack.enter_async_context(reading(root / str(rank)))
            remote = RemoteBarrier(session, server.url)
            barrier: Any = remote if rank else leading.barrier
            fetcher.group = FixedGroup(communicator, barrier, chunk_s)
            members.append(GroupMember(fetcher, communicator))
        yield Group(server.url, publisher(root / "from"), members)


async def test_each_chunk_comes_once_to_the_group_and_is_everywhere(tmp_path: Path) -> None:
    async with group(tmp_path) as here:
        for version in (1, 2):
            manifest = here.publish(version)
            came = await here.fetch(version)
            assert here.has(manifest)
            assert sum(came) == manifest.wire_bytes
            assert sum(size > 0 for size in came) > 1, "members share the link's work"
        assert not any(member.group.broken for member in here.members)


async def test_who_does_not_come_keeps_nobody_and_the_next_version_goes_together(
    tmp_path: Path,
) -> None:
    async with group(tmp_path) as here:
        manifest = here.publish(1)
        first, second, late = here.members
        came = await asyncio.gather(first.fetch(here.url, 1), second.fetch(here.url, 1))
        assert came == [manifest.wire_bytes] * 2
        assert first.communicator.broadcasts == 0
        assert await late.fetch(here.url, 1) == manifest.wire_bytes
        manifest = here.publish(2)
        assert sum(await here.fetch(2)) == manifest.wire_bytes


@pytest.mark.parametrize("dies_after", [0, 5])
async def test_a_member_that_dies_on_the_way_costs_the_group_and_no_version(
    tmp_path: Path, dies_after: int
) -> None:
    async with group(tmp_path, chunk_s=1.0) as here:
        here.members[1].communicator.dies_after = dies_after
        manifest = here.publish(1)
        came = await here.fetch(1)
        assert here.has(manifest)
        assert all(member.group.broken for member in here.members)
        assert max(came) <= manifest.wire_bytes, "what came is not fetched again"
        manifest = here.publish(2)
        assert await here.fetch(2) == [manifest.wire_bytes] * SIZE, "each for itself from now on"


async def test_what_its_owner_cannot_get_the_others_get_themselves(tmp_path: Path) -> None:
    async with group(tmp_path) as here:
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
        came = await here.fetch(1)
        assert len(failed) == 3
        assert here.has(manifest)
        assert sum(came) > manifest.wire_bytes
        assert not any(member.group.broken for member in here.members)


async def test_a_chunk_that_arrives_corrupt_is_fetched_again_over_http(tmp_path: Path) -> None:
    async with group(tmp_path, flip=True) as here:
        manifest = here.publish(1)
        await here.fetch(1)
        assert here.has(manifest)
        assert all(member.rejected for member in here.members)


async def test_members_join_under_the_leaders_name_whenever_it_comes_up(tmp_path: Path) -> None:
    made: list[tuple[Any, ...]] = []

    def make(rank: int, size: int, name: tuple[int, ...], device: int) -> StandInCommunicator:
        made.append((rank, size, name, device))
        return stand_in_group(size)[rank]

    leading = GroupLead((7, 8), LocalBarrier(2))
    server = VersionServer(ChunkStore(tmp_path), free_port(), lead=leading)
    async with aiohttp.ClientSession() as session:
        join = partial(join_group, session, make=make)
        joining = asyncio.create_task(join(Membership(1, 2, server.url, device=3)))
        await asyncio.sleep(0.1)
        async with serving(server):
            groups = [await join(Membership(0, 2, ""), leading), await joining]
    assert made == [(0, 2, (7, 8), 0), (1, 2, (7, 8), 3)]
    for joined in groups:
        joined.close()
        assert joined.broken


async def test_a_node_that_leads_no_group_says_so(tmp_path: Path) -> None:
    async with serving(ChunkStore(tmp_path)) as server, aiohttp.ClientSession() as session:
        assert not await RemoteBarrier(session, server.url).join("0" * 64, 1)

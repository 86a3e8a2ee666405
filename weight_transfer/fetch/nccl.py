"""NCCL fan-out of a version inside a fixed group of GPUs: one member has a chunk, all get it.

    barrier ─ all are here ─► chunk by chunk, in the manifest's order: its owner fetches it as any
      │                       node does, and broadcasts it ─► missing chunks afterwards: over HTTP
      └─ a member is missing: everybody over HTTP

Barrier. An NCCL broadcast can be given up only by giving up the group. So members first meet over
HTTP, at their leader: a member that is down, or behind, does not come, and the broadcast is
skipped.

Rendezvous. The group's leader names it (`/group`), and all members join under that name.

Broadcast. All members make the same calls in the same order, and each call waits for all of them:

root   length (8 bytes) ──► bytes ──► everybody checks the name

A member that dies on the way leaves the others waiting, so every call has a limit. After a call
that ran out the group is over, until its members are started anew together.

Not measured on a GPU yet.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Protocol, TypeVar

import aiohttp
import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from weight_transfer import ChunkDigestError, ChunkRef, Manifest
from weight_transfer.errors import FanoutError, FetchError, GroupBrokenError, StorageError
from weight_transfer.fetch.download import ATTEMPT_FAILURES, Session, order, whole_reply
from weight_transfer.fetch.limits import DownloadLimits
from weight_transfer.format.chunk import check_id

GROUP: Final = "/group"
MOST_NAME_BYTES: Final = 8 << 10
GroupName = Annotated[tuple[int, ...], Meta(max_length=1_024)]
"""NCCL's id of a group, a row of numbers, as its leader answers at GROUP."""
# Members get word of a version within a second of each other.
WAIT_S = 3.0
_log = logging.getLogger(__name__)
_LENGTH_BYTES = 8
_MOST_BYTES = 1 << 32
_NOT_HERE = (1 << 64) - 1
# Limit of one NCCL call: longer than a chunk takes over the slow link, with its retries.
CHUNK_S = 120.0
# Chunks that a member obtains ahead of their broadcast.
CHUNKS_AHEAD = 16
ASK_S = 1.0


class Barrier(Protocol):
    """Barrier at which all members of a group meet before they broadcast a version's chunks."""

    async def join(self, what: str, rank: int) -> bool:
        """Wait for the other ranks; return True if all came for the same version `what` in time."""
        ...


class LocalBarrier:
    """Barrier of a group in its leader's process; ranks that wait longer than `wait_s` fail."""

    def __init__(self, size: int, wait_s: float = WAIT_S) -> None:
        self._size = size
        self._wait_s = wait_s
        self._here: dict[str, tuple[set[int], asyncio.Future[bool]]] = {}

    async def join(self, what: str, rank: int) -> bool:
        if not 0 <= rank < self._size:
            return False
        if what not in self._here:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[bool] = loop.create_future()
            self._here[what] = (set(), future)
            loop.call_later(self._wait_s, self._settle, what, future, False)
        ranks, all_came = self._here[what]
        ranks.add(rank)
        if len(ranks) == self._size:
            self._settle(what, all_came, True)
        return await asyncio.shield(all_came)

    def _settle(self, what: str, all_came: asyncio.Future[bool], joined: bool) -> None:
        if not all_came.done():
            all_came.set_result(joined)
            del self._here[what]


@dataclass(frozen=True, slots=True)
class GroupLead:
    """Leader's part of a group: NCCL's id of the group, a row of numbers, and the barrier."""

    unique_id: tuple[int, ...]
    barrier: LocalBarrier


class RemoteBarrier:
    """Client of the leader's barrier, for other members: `POST {leader}/group/{what}/{rank}`."""

    def __init__(self, session: Session, leader: str, wait_s: float = WAIT_S) -> None:
        self._session = session
        self._leader = leader
        self._timeout = aiohttp.ClientTimeout(total=2 * wait_s)

    async def join(self, what: str, rank: int) -> bool:
        """Wait for the other ranks; return True if all came for the same version `what` in time.

        False if the leader does not answer.
        """
        url = f"{self._leader}/group/{what}/{rank}"
        try:
            most = len("not all")
            return await whole_reply(self._session, url, self._timeout, most, asked=b"") == b"all"
        except ATTEMPT_FAILURES as error:
            _log.info("%s holds no barrier for its group: %s", self._leader, error)
            return False


class Communicator(Protocol):
    """Broadcast channel of a group of GPUs, NCCL's or a test's."""

    rank: int
    size: int

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        """Send the root's `body` to all members; return it on each of them.

        The others hand in a buffer of the same length.
        """
        ...

    def abort(self) -> None:
        """End all waiting calls of this group, from another thread."""
        ...


def hand(communicator: Communicator, name: str, body: bytes | None, root: int) -> bytes | None:
    """Broadcast a chunk from the member `root`, which has its `body`, and return it on all members.

    All members make this call, in the same order. Return None where the root could not get the
    chunk. Raises ChunkDigestError where the bytes are not what the name says, GroupBrokenError for
    an impossible length.
    """
    if communicator.rank != root and body is not None:
        raise FanoutError("only the root of a fan-out hands in the chunk")
    length = _NOT_HERE if body is None else len(body)
    head = np.frombuffer(length.to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    nbytes = int.from_bytes(communicator.broadcast(head, root).tobytes(), "little")
    if nbytes == _NOT_HERE:
        return None
    if nbytes > _MOST_BYTES:
        raise GroupBrokenError(f"a chunk of {nbytes} bytes was announced; the group is out of step")
    buffer = np.zeros(nbytes, np.uint8) if body is None else np.frombuffer(body, np.uint8)
    encoded = communicator.broadcast(buffer, root).tobytes()
    check_id(name, encoded)
    return encoded


class NcclCommunicator:
    """Broadcast channel over NCCL, by CuPy.

    `unique_id`: id of the group, which one member makes by `new_id`. The constructor returns once
    all members have made theirs. `device`: CUDA ordinal of the GPU.
    """

    def __init__(self, rank: int, size: int, unique_id: tuple[int, ...], device: int = 0) -> None:
        self.rank, self.size, self._device = rank, size, device
        self._cupy = _cupy()
        with self._cupy.cuda.Device(device):
            self._group: Any = self._cupy.cuda.nccl.NcclCommunicator(size, unique_id, rank)

    @staticmethod
    def new_id() -> tuple[int, ...]:
        """Return a new id of a group. Raises FanoutError without CuPy and a GPU."""
        unique_id: tuple[int, ...] = _cupy().cuda.nccl.get_unique_id()
        return unique_id

    def broadcast(self, body: NDArray[np.uint8], root: int) -> NDArray[np.uint8]:
        """Send the root's `body` to all members through their GPUs; return it in host memory."""
        nccl = self._cupy.cuda.nccl
        with self._cupy.cuda.Device(self._device):
            stream = self._cupy.cuda.get_current_stream()
            device = self._cupy.asarray(body)
            self._group.bcast(device.data.ptr, device.size, nccl.NCCL_UINT8, root, stream.ptr)
            received: NDArray[np.uint8] = self._cupy.asnumpy(device)
        return received

    def abort(self) -> None:
        self._group.abort()


def _cupy() -> Any:  # noqa: ANN401 -- a library that is here only where a GPU is
    try:
        import cupy
        import cupy.cuda.nccl
    except ImportError as error:
        raise FanoutError(
            "fan-out over NCCL needs CuPy and a GPU; without them neighbours share over HTTP"
        ) from error
    return cupy


Result = TypeVar("Result")


class FixedGroup:
    """One member's part in a fixed group of GPUs; its NCCL calls run in one thread, in order."""

    def __init__(
        self, communicator: Communicator, barrier: Barrier, chunk_s: float = CHUNK_S
    ) -> None:
        self._communicator = communicator
        self._barrier = barrier
        self._chunk_s = chunk_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rose-group")
        self._lock = asyncio.Lock()
        self.broken = ""
        """Reason why the group broadcasts no more chunks; empty while it does."""

    async def bring(
        self,
        manifest: Manifest,
        receiving: DownloadLimits,
        obtain: Callable[[ChunkRef], Awaitable[int]],
        on_reject: Callable[[str], None],
    ) -> int:
        """Bring into the store as many of a version's chunks as the group can broadcast.

        Each member fetches its own share by `obtain`. Return the bytes that this member fetched
        from outside of the group: 0 if the group is broken or a member did not come. Raises
        StorageError after its share was broadcast.
        """
        async with self._lock:
            if self.broken:
                return 0
            version = await receiving.read(partial(_named, manifest))
            if not await self._barrier.join(version, self._communicator.rank):
                return 0
            received: list[int] = []

            async def counted(ref: ChunkRef) -> None:
                received.append(await obtain(ref))

            try:
                await self._hand_around(manifest, receiving, counted, on_reject)
            except StorageError:
                raise
            except TimeoutError:
                self._break("a member did not answer in time")
            except Exception as error:  # noqa: BLE001 - whatever NCCL or a driver says
                # The others are in the middle of their calls, and would misread the next one.
                self._break(f"{type(error).__name__}: {error}")
            except asyncio.CancelledError:
                self._break("this member was stopped")
                raise
            return sum(received)

    def close(self) -> None:
        """Leave the group for good; it passes on no more chunks, and the members use HTTP."""
        if not self.broken:
            self._break("it was closed")
        self._thread.shutdown(wait=False)

    async def _hand_around(
        self,
        manifest: Manifest,
        receiving: DownloadLimits,
        obtain: Callable[[ChunkRef], Awaitable[None]],
        on_reject: Callable[[str], None],
    ) -> None:
        chunks = {ref.id: ref for ref in manifest.chunks}
        roots = {name: self._root(name) for name in chunks}
        mine = (ref for name, ref in chunks.items() if roots[name] == self._communicator.rank)
        coming: dict[str, asyncio.Future[None]] = {}

        async def mine_of(name: str) -> bytes | None:
            while len(coming) < CHUNKS_AHEAD and (ref := next(mine, None)):
                coming[ref.id] = asyncio.ensure_future(obtain(ref))
            body = await _got(coming[name], receiving, name)
            del coming[name]
            return body

        refused: StorageError | None = None
        try:
            for name, root in roots.items():
                own = root == self._communicator.rank
                body = await mine_of(name) if own else None
                try:
                    call = partial(hand, self._communicator, name, body, root)
                    handed = await self._call(call)
                    if handed is not None and not own and refused is None:
                        await receiving.work(partial(receiving.store.put, handed))
                except ChunkDigestError:
                    on_reject(name)
                except StorageError as error:
                    refused = error
        finally:
            for task in coming.values():
                task.cancel()
            await asyncio.gather(*coming.values(), return_exceptions=True)
        if refused is not None:
            raise refused

    def _root(self, name: str) -> int:
        """Return the rank that fetches and broadcasts a chunk, the same on all members."""
        return int(order(map(str, range(self._communicator.size)), name)[0])

    async def _call(self, call: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._chunk_s):
            return await loop.run_in_executor(self._thread, call)

    def _break(self, why: str) -> None:
        self.broken = why
        self._communicator.abort()
        _log.warning("the group of GPUs hands no chunks around any more: %s", why)


def _named(manifest: Manifest) -> str:
    """Return a digest of the manifest in hex, which is the members' name of the version at the
    barrier."""
    digest = hashlib.blake2b(digest_size=32)
    for part in manifest.parts():
        digest.update(part)
    return digest.hexdigest()


async def _got(coming: asyncio.Future[None], receiving: DownloadLimits, name: str) -> bytes | None:
    """Return the bytes of a chunk that this member fetches, None when the fetch failed."""
    try:
        await coming
        return await receiving.work(partial(receiving.store.get, name))
    except (FetchError, StorageError, ChunkDigestError):
        return None


_read_name = msgspec.json.Decoder(GroupName).decode

MakeCommunicator = Callable[[int, int, tuple[int, ...], int], Communicator]


@dataclass(frozen=True, slots=True)
class Membership:
    """Rank of this member in a group of `size` members, of which rank 0 leads.

    `leader`: address of the leader's relay. `device`: CUDA ordinal of this member's GPU.
    """

    rank: int
    size: int
    leader: str
    device: int = 0


def lead(size: int) -> GroupLead:
    """Make rank 0's part of a group, its id and barrier.

    Raises FanoutError without CuPy and a GPU.
    """
    return GroupLead(NcclCommunicator.new_id(), LocalBarrier(size))


async def join_group(
    session: Session,
    mine: Membership,
    leading: GroupLead | None = None,
    make: MakeCommunicator = NcclCommunicator,
) -> FixedGroup:
    """Join a group and return this member's part in it, once all members have joined.

    `leading`: the leader's own part, given on rank 0 alone; other members ask the leader for the
    group's id until it answers, without a limit.
    """
    barrier: Barrier
    if leading is not None:
        name, barrier = leading.unique_id, leading.barrier
    else:
        name, barrier = (
            await _members_named(session, mine.leader),
            RemoteBarrier(session, mine.leader),
        )
    communicator = await asyncio.to_thread(make, mine.rank, mine.size, name, mine.device)
    return FixedGroup(communicator, barrier)


async def _members_named(session: Session, leader: str) -> tuple[int, ...]:
    """Return the group's id from the leader, asking every second until it answers."""
    timeout = aiohttp.ClientTimeout(total=5 * ASK_S)
    while True:
        try:
            reply = await whole_reply(session, f"{leader}{GROUP}", timeout, MOST_NAME_BYTES)
            name: tuple[int, ...] = _read_name(reply)
        except ATTEMPT_FAILURES:
            # Weights come over HTTP until the leader is up.
            await asyncio.sleep(ASK_S)
        else:
            return name

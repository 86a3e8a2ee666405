"""A fixed group brings a version together: each chunk comes once, to one member, and is handed on.

    muster ─ all are here ─► chunk by chunk, in the manifest's order: its owner obtains it as any
      │                      node does, and hands it to all ─► what is missing then: over HTTP
      └─ one does not come: everybody over HTTP
A member that dies on the way leaves the others waiting, so every call has a limit; after one that
ran out the group is over, until its members are started anew together.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from rose.publish.download import FetchError
from rose.publish.fanout import Fanout
from rose.publish.muster import Muster
from rose.publish.receiving import Receiving, StorageError
from rose.publish.rendezvous import order
from weight_transfer import ChunkDigestError, ChunkRef, Manifest

# Longer than a chunk takes over the slow link, with its retries.
CHUNK_S = 120.0
# Of its own chunks a member obtains so many before they are handed on.
CHUNKS_AHEAD = 16

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class FixedGroup:
    """One member's view of its group. Its calls are made by one thread, in order."""

    def __init__(self, fanout: Fanout, muster: Muster, chunk_s: float = CHUNK_S) -> None:
        self._fanout = fanout
        self._muster = muster
        self._chunk_s = chunk_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rose-group")
        self._lock = asyncio.Lock()
        self.broken = ""
        """Why nothing is handed around any more; empty while it is."""

    async def bring(
        self,
        manifest: Manifest,
        receiving: Receiving,
        obtain: Callable[[ChunkRef], Awaitable[int]],
        on_reject: Callable[[str], None],
    ) -> int:
        """Have as many of a version's chunks in the store as the group can bring.

        Returns the bytes that came to this member from outside of the group. Raises StorageError
        after its part for the others is done.
        """
        async with self._lock:
            if self.broken:
                return 0
            said = await receiving.read(partial(_named, manifest))
            if not await self._muster.join(said, self._fanout.rank):
                return 0
            came: list[int] = []

            async def counted(ref: ChunkRef) -> None:
                came.append(await obtain(ref))

            try:
                await self._hand_around(manifest, receiving, counted, on_reject)
            except StorageError:
                raise
            except TimeoutError:
                self._break("a member did not answer in time")
            except Exception as error:  # noqa: BLE001 - whatever NCCL or a driver says
                # The others are somewhere in the middle: whatever came next would be misread.
                self._break(f"{type(error).__name__}: {error}")
            except asyncio.CancelledError:
                self._break("this member was stopped")
                raise
            return sum(came)

    def close(self) -> None:
        """Leave: the others go on over HTTP."""
        if not self.broken:
            self._break("it was closed")
        self._thread.shutdown(wait=False)

    async def _hand_around(
        self,
        manifest: Manifest,
        receiving: Receiving,
        obtain: Callable[[ChunkRef], Awaitable[None]],
        on_reject: Callable[[str], None],
    ) -> None:
        chunks = {ref.id: ref for ref in manifest.chunks}
        roots = {name: self._root(name) for name in chunks}
        mine = (ref for name, ref in chunks.items() if roots[name] == self._fanout.rank)
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
                own = root == self._fanout.rank
                body = await mine_of(name) if own else None
                try:
                    call = partial(self._fanout.hand, name, body, root)
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
        """Whose chunk it is: everybody finds the same."""
        return int(order(map(str, range(self._fanout.size)), name)[0])

    async def _call(self, call: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._chunk_s):
            return await loop.run_in_executor(self._thread, call)

    def _break(self, why: str) -> None:
        self.broken = why
        self._fanout.abort()
        _log.warning("the group of GPUs hands no chunks around any more: %s", why)


def _named(manifest: Manifest) -> str:
    """Which version it is, said in a word that members compare."""
    digest = hashlib.blake2b(digest_size=32)
    for part in manifest.parts():
        digest.update(part)
    return digest.hexdigest()


async def _got(coming: "asyncio.Future[None]", receiving: Receiving, name: str) -> bytes | None:
    """A chunk that this member was to bring; None when it could not."""
    try:
        await coming
        return await receiving.work(partial(receiving.store.get, name))
    except (FetchError, StorageError, ChunkDigestError):
        return None

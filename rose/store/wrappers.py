"""Stores around a store: `MeteredStore` times its calls, `FencedStore` writes for one term.

Every write of a fenced store is a transaction that also expects the key `leader` of this term, so a
leader that was replaced without knowing changes nothing more. It expects and replaces the key
`fence` too, so the writes of a term are done in their order and each once: one that was given up
unanswered can never be carried out after a later one.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from typing_extensions import override

from rose.errors import RefusedError, UnavailableError
from rose.store.protocol import (
    ABSENT,
    Expect,
    Listing,
    Put,
    Store,
    StoreChange,
    StoreEntry,
    TxnStore,
    Write,
)

T = TypeVar("T")
OnCall = Callable[[str, float, bool], None]
"""Function that takes the call's name, its seconds, and True if the store answered."""
LEADER, FENCE = "leader", "fence"


class WrappedStore(TxnStore):
    """Base of a store around another one: passes every call on, through `_asked`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def _asked(self, call: str, answer: Awaitable[T]) -> T:
        del call
        return await answer

    async def get(self, key: str) -> StoreEntry | None:
        return await self._asked("get", self._store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._asked("list", self._store.list(prefix))

    @override
    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        return await self._asked("txn", self._store.txn(expect, writes))

    async def grant_lease(self, ttl_s: float) -> int:
        return await self._asked("grant_lease", self._store.grant_lease(ttl_s))

    async def keep_lease(self, lease: int) -> float:
        return await self._asked("keep_lease", self._store.keep_lease(lease))

    async def revoke_lease(self, lease: int) -> None:
        return await self._asked("revoke_lease", self._store.revoke_lease(lease))

    def watch(self, since: Listing) -> AsyncGenerator[StoreChange, None]:
        return self._store.watch(since)

    async def close(self) -> None:
        await self._store.close()


class MeteredStore(WrappedStore):
    """Store around another that reports each call's name, seconds and success to `on_call`.

    Watches are not reported.
    """

    def __init__(self, store: Store, on_call: OnCall) -> None:
        super().__init__(store)
        self._on_call = on_call

    @override
    async def _asked(self, call: str, answer: Awaitable[T]) -> T:
        began_s = time.monotonic()
        answered = True
        try:
            return await answer
        except UnavailableError:
            answered = False
            raise
        finally:
            self._on_call(call, time.monotonic() - began_s, answered)


class LeadershipLostError(RefusedError):
    """Error of a write or step of a scheduler that no longer leads."""


class FencedStore(WrappedStore):
    """Store around another whose writes succeed only while this process leads in `term`.

    Writes after that raise LeadershipLostError. on_lost: called when a write is refused, or `leads`
    returns False.
    """

    def __init__(
        self, store: Store, term: int, leads: Callable[[], bool], on_lost: Callable[[], None]
    ) -> None:
        super().__init__(store)
        self._term = term
        self._leads = leads
        self._on_lost = on_lost
        self._order = asyncio.Lock()
        self._fence: int | None = None
        self._writes = 0

    @override
    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        async with self._order:
            self._writes += 1
            stamp = json.dumps({"term": self._term, "write": self._writes}).encode()
            while True:
                if not self._leads():
                    self._lost()
                fence = await self._fence_revision()
                expected = (Expect(LEADER, self._term), Expect(FENCE, fence), *expect)
                # Forgotten until it is known: an attempt that is not answered may move it.
                self._fence = None
                revision = await self._store.txn(expected, (*writes, Put(FENCE, stamp)))
                if revision is not None:
                    self._fence = revision
                    return revision
                leader = await self._store.get(LEADER)
                if leader is None or leader.revision != self._term:
                    self._lost()
                now = await self._store.get(FENCE)
                if now is not None and now.value == stamp:
                    return now.revision
                if (now.revision if now else ABSENT) == fence:
                    return None  # the caller expected something else

    async def _fence_revision(self) -> int:
        if self._fence is None:
            entry = await self._store.get(FENCE)
            self._fence = entry.revision if entry else ABSENT
        return self._fence

    def _lost(self) -> None:
        self._on_lost()
        raise LeadershipLostError("this scheduler leads no more; ask the one that does")

    def leads(self) -> bool:
        """Return True while this process surely leads in this term; a later term does not count."""
        return self._leads()

    @override
    async def close(self) -> None:
        """Do nothing: the wrapped store outlives the term."""

"""MeteredStore: any store, whose calls are timed and whose failures are counted."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from typing_extensions import override

from rose.errors import UnavailableError
from rose.store.protocol import Change, Expect, Listing, Store, StoreEntry, TxnStore, Write

T = TypeVar("T")
OnCall = Callable[[str, float, bool], None]
"""Takes the call's name, its seconds, and whether the store answered."""


class MeteredStore(TxnStore):
    """Hands every call on. A watch is a wait by itself: it is not timed."""

    def __init__(self, store: Store, on_call: OnCall) -> None:
        self._store = store
        self._on_call = on_call

    async def _timed(self, call: str, asked: Awaitable[T]) -> T:
        began_s = time.monotonic()
        answered = True
        try:
            return await asked
        except UnavailableError:
            answered = False
            raise
        finally:
            self._on_call(call, time.monotonic() - began_s, answered)

    async def get(self, key: str) -> StoreEntry | None:
        return await self._timed("get", self._store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._timed("list", self._store.list(prefix))

    @override
    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        return await self._timed("txn", self._store.txn(expect, writes))

    async def grant_lease(self, ttl_s: float) -> int:
        return await self._timed("grant_lease", self._store.grant_lease(ttl_s))

    async def keep_lease(self, lease: int) -> float:
        return await self._timed("keep_lease", self._store.keep_lease(lease))

    async def revoke_lease(self, lease: int) -> None:
        return await self._timed("revoke_lease", self._store.revoke_lease(lease))

    def watch(self, since: Listing) -> AsyncGenerator[Change, None]:
        return self._store.watch(since)

    async def close(self) -> None:
        await self._store.close()

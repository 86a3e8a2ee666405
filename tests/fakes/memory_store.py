"""InMemoryStore: the contract of `rose.store` on a dict, for tests that need no file."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from rose.store.protocol import (
    ABSENT,
    Expect,
    LeaseGoneError,
    Listing,
    Put,
    StoreChange,
    StoreEntry,
    TxnStore,
    Write,
    difference,
    note,
)

POLL_S = 0.01


class InMemoryStore(TxnStore):
    """The store's contract on a dict. `now` holds its entries; `write` is a put of one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now: dict[str, StoreEntry] = {}
        self._clock = clock
        self._revision = ABSENT
        self._compacted = ABSENT
        self._changes: list[StoreChange] = []
        self._leases: dict[int, tuple[float, float]] = {}
        self._lease_of: dict[str, int] = {}
        self._lease_ids = itertools.count(1)

    @property
    def entries(self) -> tuple[StoreEntry, ...]:
        """All entries, in the order of their keys."""
        return tuple(self.now[key] for key in sorted(self.now))

    def write(self, key: str, value: bytes | None, lease: int = 0) -> int:
        """Put a value; None deletes the key."""
        self._revision += 1
        self._set(key, value, lease)
        return self._revision

    async def get(self, key: str) -> StoreEntry | None:
        self._end_leases()
        return self.now.get(key)

    async def list(self, prefix: str) -> Listing:
        self._end_leases()
        found = tuple(entry for entry in self.entries if entry.key.startswith(prefix))
        return Listing(prefix, found, self._revision)

    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        self._end_leases()
        if any(self._revision_of(each.key) != each.revision for each in expect):
            return None
        leases = {each.lease for each in writes if isinstance(each, Put) and each.lease}
        if not leases <= self._leases.keys():
            raise LeaseGoneError("the lease is over")
        done = [each for each in writes if isinstance(each, Put) or each.key in self.now]
        self._revision += bool(done)
        for each in done:
            value, lease = (each.value, each.lease) if isinstance(each, Put) else (None, 0)
            self._set(each.key, value, lease)
        return self._revision

    async def watch(self, since: Listing) -> AsyncGenerator[StoreChange, None]:
        known = {entry.key: entry.revision for entry in since.entries}
        seen = since.revision
        while True:
            self._end_leases()
            now = await self.list(since.prefix)
            if seen < self._compacted:
                changes = difference(known, now)
            else:
                newer = (each for each in self._changes if each.revision > seen)
                changes = [each for each in newer if each.key.startswith(since.prefix)]
            seen = now.revision
            for change in changes:
                note(known, change)
                yield change
            await asyncio.sleep(POLL_S)

    async def compact(self, revision: int) -> None:
        self._compacted = max(self._compacted, revision)
        self._changes = [each for each in self._changes if each.revision > revision]

    async def grant_lease(self, ttl_s: float) -> int:
        lease = next(self._lease_ids)
        self._leases[lease] = (ttl_s, self._clock() + ttl_s)
        return lease

    async def keep_lease(self, lease: int) -> float:
        self._end_leases()
        if lease not in self._leases:
            return 0.0
        ttl_s, _ = self._leases[lease]
        self._leases[lease] = (ttl_s, self._clock() + ttl_s)
        return ttl_s

    async def revoke_lease(self, lease: int) -> None:
        self._leases.pop(lease, None)
        self._end_leases()

    async def close(self) -> None:
        """Nothing to let go of."""

    def _set(self, key: str, value: bytes | None, lease: int) -> None:
        self._changes.append(StoreChange(key, value, self._revision))
        self._lease_of.pop(key, None)
        if value is None:
            self.now.pop(key, None)
            return
        self.now[key] = StoreEntry(key, bytes(value), self._revision)
        if lease:
            self._lease_of[key] = lease

    def _revision_of(self, key: str) -> int:
        return self.now[key].revision if key in self.now else ABSENT

    def _end_leases(self) -> None:
        now_s = self._clock()
        self._leases = {n: each for n, each in self._leases.items() if now_s < each[1]}
        for key in [key for key, lease in self._lease_of.items() if lease not in self._leases]:
            self.write(key, None)

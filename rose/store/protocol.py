"""Interface of the store of control state: keys, transactions, leases, watches.

A store is one ordered history. Each transaction that writes makes one revision, greater than all
before it; an entry carries the revision of the transaction that wrote it.

    revision   5          6                7
    writes     a = 1      b = 1, a gone    a = 2
    list("")   {a: 5}     {b: 6}           {a: 7, b: 6}

A key may be written under a lease: when the lease ends, the key is deleted, and that is a revision
of its own. `watch` follows the history from a listing on.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.errors import RefusedError

ABSENT = 0  # the revision of a key that is not there


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Key with its value, and the revision of the write that set it (>= 1, grows with writes)."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries whose keys have a prefix, in the order of keys, as they were at `revision`."""

    prefix: str
    entries: tuple[StoreEntry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class StoreChange:
    """Write to a key, or its deletion (value None); revision: that of the transaction.

    A deletion that a watch missed, since the history was compacted, has the revision of the listing
    in which the key was missing.
    """

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Expect:
    """Condition of a transaction: the key's entry has this revision; `ABSENT`: no entry."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write of a value to a key; if `lease` is not 0 the key is deleted when that lease ends."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Deletion of a key; a missing key is left so."""

    key: str

    @property
    def value(self) -> None:
        return None


Write = Put | Delete


class LeaseGoneError(RefusedError):
    """Error of a write under a lease that has ended."""


class Store(Protocol):
    """Durable map from str to bytes with transactions, leases and watches.

    A write that has returned survives the process. All methods raise `UnavailableError` when the
    store does not answer; the write may have been done nevertheless, which the caller can read. No
    key is written twice in a transaction.
    """

    async def get(self, key: str) -> StoreEntry | None:
        """Return the entry of the key, None without one."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Return all entries whose key starts with the prefix, and the store's revision."""
        ...

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write the value, whatever the key has now; return the new revision."""
        ...

    async def delete(self, key: str) -> int:
        """Delete the key; return the store's revision, a new one if the key was there."""
        ...

    async def compare_and_swap(
        self, key: str, expected_revision: int, value: bytes, lease: int = 0
    ) -> int | None:
        """Write the value only if the key has `expected_revision` (`ABSENT`: is missing).

        Returns the new revision, None if the key has another revision.
        """
        ...

    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        """Do all writes at once if all conditions hold; return the revision, None if one does not
        hold.

        Raises `LeaseGoneError` if a write is under a lease that has ended.
        """
        ...

    async def grant_lease(self, ttl_s: float) -> int:
        """Return the id, never 0, of a new lease that lives for at least `ttl_s` unless renewed."""
        ...

    async def keep_lease(self, lease: int) -> float:
        """Renew the lease for its whole time to live; return the seconds left, 0 after its end."""
        ...

    async def revoke_lease(self, lease: int) -> None:
        """End the lease and delete its keys; do nothing for one that has ended."""
        ...

    def watch(self, since: Listing) -> AsyncGenerator[StoreChange, None]:
        """Yield all changes after a listing, in order, each once; never end until cancelled.

        The watch outlasts restarts of the store. If the history was compacted meanwhile, it lists
        again and yields the difference: each key's newest value, none of those in between.
        """
        ...

    async def close(self) -> None:
        """Close files and connections; the store must not be used afterwards."""
        ...


def difference(known: dict[str, int], now: Listing) -> list[StoreChange]:
    """Return the changes, in order, from `known`, revisions by key, to a newer listing."""
    there = {entry.key for entry in now.entries}
    changed = [
        StoreChange(entry.key, entry.value, entry.revision)
        for entry in now.entries
        if known.get(entry.key) != entry.revision
    ]
    gone = [StoreChange(key, None, now.revision) for key in sorted(known.keys() - there)]
    return sorted(changed + gone, key=lambda change: change.revision)


def note(known: dict[str, int], change: StoreChange) -> None:
    """Update `known`, revisions by key, for a change."""
    if change.value is None:
        known.pop(change.key, None)
    else:
        known[change.key] = change.revision


class TxnStore:
    """Base of the stores: put, delete and compare_and_swap, by `txn` of the subclass."""

    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        raise NotImplementedError

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return _done(await self.txn((), (Put(key, value, lease),)))

    async def delete(self, key: str) -> int:
        return _done(await self.txn((), (Delete(key),)))

    async def compare_and_swap(
        self, key: str, expected_revision: int, value: bytes, lease: int = 0
    ) -> int | None:
        """Write the value if the key has `expected_revision`; return the new one, or None."""
        return await self.txn((Expect(key, expected_revision),), (Put(key, value, lease),))


def _done(revision: int | None) -> int:
    assert revision is not None, "nothing was expected"
    return revision

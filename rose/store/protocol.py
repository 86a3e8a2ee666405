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
    """A value and the revision of the write that put it there (>= 1, grows with each write)."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries of a prefix, in the order of their keys, as they were at `revision`."""

    prefix: str
    entries: tuple[StoreEntry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A write to a key, or its deletion (`value` None); `revision` is that of the transaction.

    A deletion that a watch missed, since the history was compacted, carries the revision of the
    listing in which the key was missing.
    """

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Expect:
    """The condition that a key's entry is of this revision; `ABSENT`: that there is none."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """A write of a value; `lease` not 0: the key ends with that lease."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """A deletion; of a key that is not there it does nothing."""

    key: str

    @property
    def value(self) -> None:
        return None


Write = Put | Delete


class LeaseGoneError(RefusedError):
    """A key was written under a lease that is over."""


class Store(Protocol):
    """Durable map from str to bytes. A write that has returned survives the process.

    All methods raise `UnavailableError` when the store does not answer; of a write that may have
    been done nevertheless, the caller decides by reading. No key is written twice in a transaction.
    """

    async def get(self, key: str) -> StoreEntry | None:
        """Return the entry of the key, None without one."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Return all entries whose key starts with the prefix."""
        ...

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write whatever is there now; returns the new revision."""
        ...

    async def delete(self, key: str) -> int:
        """Remove the key; returns the revision of the store, new if the key was there."""
        ...

    async def compare_and_swap(
        self, key: str, expected_revision: int, value: bytes, lease: int = 0
    ) -> int | None:
        """Write only over `expected_revision` (`ABSENT`: only if missing).

        Returns the new revision, None when somebody else wrote in between.
        """
        ...

    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        """Do all writes at once if everything is as expected; returns the revision, else None.

        Raises `LeaseGoneError` when a lease that is written under is over.
        """
        ...

    async def grant_lease(self, ttl_s: float) -> int:
        """Make a lease that lives for at least `ttl_s` unless kept; returns its id, never 0."""
        ...

    async def keep_lease(self, lease: int) -> float:
        """Let the lease live for another TTL; returns the seconds left, 0 when it is gone."""
        ...

    async def revoke_lease(self, lease: int) -> None:
        """End the lease and its keys now; one that is gone stays gone."""
        ...

    def watch(self, since: Listing) -> AsyncGenerator[Change, None]:
        """Yield all changes after a listing, in order, each once, until cancelled.

        It outlasts restarts of the store. Where history was compacted meanwhile, it lists again and
        yields the difference: each key's newest value, none of those in between.
        """
        ...

    async def close(self) -> None:
        """Let go of files and connections; using the store afterwards is an error."""
        ...


def difference(known: dict[str, int], now: Listing) -> list[Change]:
    """Return the changes from `known`, revisions by key, to a newer listing."""
    there = {entry.key for entry in now.entries}
    changed = [
        Change(entry.key, entry.value, entry.revision)
        for entry in now.entries
        if known.get(entry.key) != entry.revision
    ]
    gone = [Change(key, None, now.revision) for key in sorted(known.keys() - there)]
    return sorted(changed + gone, key=lambda change: change.revision)


def note(known: dict[str, int], change: Change) -> None:
    """Keep `known` as it is after a change."""
    if change.value is None:
        known.pop(change.key, None)
    else:
        known[change.key] = change.revision


class TxnStore:
    """Base of the stores: the operations that are built on `txn` alone."""

    async def txn(self, expect: Sequence[Expect], writes: Sequence[Write]) -> int | None:
        raise NotImplementedError

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return _done(await self.txn((), (Put(key, value, lease),)))

    async def delete(self, key: str) -> int:
        return _done(await self.txn((), (Delete(key),)))

    async def compare_and_swap(
        self, key: str, expected_revision: int, value: bytes, lease: int = 0
    ) -> int | None:
        """Write only over `expected_revision`; None when somebody else wrote in between."""
        return await self.txn((Expect(key, expected_revision),), (Put(key, value, lease),))


def _done(revision: int | None) -> int:
    assert revision is not None, "nothing was expected"
    return revision

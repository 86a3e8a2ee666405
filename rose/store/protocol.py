"""Interface of a store of control state."""

from dataclasses import dataclass
from typing import Protocol

ABSENT = 0  # the revision of a key that is not there: compare_and_swap(key, ABSENT, …) creates it


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A value and the revision of the write that put it there (>= 1, grows with each write)."""

    key: str
    value: bytes
    revision: int


class Store(Protocol):
    """Durable map from str to bytes. A write that has returned survives the process.

    Revisions come from one counter of the whole store, so a deleted and recreated key never
    carries an old revision again. All methods raise `UnavailableError` when the store is gone.
    """

    def get(self, key: str) -> StoreEntry | None:
        """The entry of the key, None when there is none."""
        ...

    def put(self, key: str, value: bytes) -> int:
        """Write whatever is there now; returns the new revision."""
        ...

    def compare_and_swap(self, key: str, expected_revision: int, value: bytes) -> int | None:
        """Write only over `expected_revision` (`ABSENT`: only if missing).

        Returns the new revision, None when somebody else wrote in between.
        """
        ...

    def list(self, prefix: str) -> "list[StoreEntry]":
        """All entries whose key starts with the prefix, in the order of their keys."""
        ...

    def delete(self, key: str) -> bool:
        """Remove the key; False when it was not there."""
        ...

    def close(self) -> None:
        """Let go of files and connections; using the store afterwards is an error."""
        ...

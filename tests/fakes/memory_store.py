"""InMemoryStore: the contract of `rose.store` on a dict, for tests that need no file."""

from rose.scheduler.store import ABSENT, StoreEntry


class InMemoryStore:
    """The store's contract on a dict."""

    def __init__(self) -> None:
        self._entries: dict[str, StoreEntry] = {}
        self._revision = ABSENT

    def get(self, key: str) -> StoreEntry | None:
        """The entry of the key, None when there is none."""
        return self._entries.get(key)

    def put(self, key: str, value: bytes) -> int:
        """Write whatever is there now; returns the new revision."""
        self._revision += 1
        self._entries[key] = StoreEntry(key, bytes(value), self._revision)
        return self._revision

    def compare_and_swap(self, key: str, expected_revision: int, value: bytes) -> int | None:
        """Write only over `expected_revision`; None when somebody else wrote in between."""
        entry = self._entries.get(key)
        if (entry.revision if entry else ABSENT) != expected_revision:
            return None
        return self.put(key, value)

    def list(self, prefix: str) -> "list[StoreEntry]":
        """All entries whose key starts with the prefix, in the order of their keys."""
        return [self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)]

    def delete(self, key: str) -> bool:
        """Remove the key; False when it was not there."""
        return self._entries.pop(key, None) is not None

    def close(self) -> None:
        """Nothing to let go of."""

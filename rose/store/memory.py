"""A store that forgets everything with its process: for tests and simulations."""

from rose.store.protocol import ABSENT, Entry


class InMemoryStore:
    """The store's contract on a dict."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._revision = ABSENT

    def get(self, key: str) -> Entry | None:
        """The entry of the key, None when there is none."""
        return self._entries.get(key)

    def put(self, key: str, value: bytes) -> int:
        """Write whatever is there now; returns the new revision."""
        self._revision += 1
        self._entries[key] = Entry(key, bytes(value), self._revision)
        return self._revision

    def compare_and_swap(self, key: str, expected_revision: int, value: bytes) -> int | None:
        """Write only over `expected_revision`; None when somebody else wrote in between."""
        entry = self._entries.get(key)
        if (entry.revision if entry else ABSENT) != expected_revision:
            return None
        return self.put(key, value)

    def list(self, prefix: str) -> "list[Entry]":
        """All entries whose key starts with the prefix, in the order of their keys."""
        return [self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)]

    def delete(self, key: str) -> bool:
        """Remove the key; False when it was not there."""
        return self._entries.pop(key, None) is not None

    def close(self) -> None:
        """Nothing to let go of."""

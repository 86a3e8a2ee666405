"""Recent request ids: a repeated request gets the first one's answer, never a second one."""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Conflict(Enum):
    """Reason why a request id cannot be used."""

    OTHER_BODY = "the request id was used with another body"


@dataclass(slots=True)
class _Entry(Generic[T]):
    fingerprint: int
    value: T
    done: bool = False


class IdempotencyCache(Generic[T]):
    """Cache of values by request id: all running requests, and the newest `capacity` finished ones.

    Finished ones together have at most `capacity_bytes`, except that the newest one is always kept.
    The caller bounds the number of running ones.
    """

    def __init__(self, capacity: int, capacity_bytes: int | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; keep at least one answer")
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._entries: dict[str, _Entry[T]] = {}
        # Finished ones with their sizes, oldest first.
        self._done: OrderedDict[str, int] = OrderedDict()

    def find(self, request_id: str, fingerprint: int) -> T | Conflict | None:
        """Return the value of a request with this id and body, None for an unknown id.

        Returns `Conflict.OTHER_BODY` for a known id with another body. fingerprint: hash of the
        body.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        return entry.value if entry.fingerprint == fingerprint else Conflict.OTHER_BODY

    def open(self, request_id: str, fingerprint: int, value: T) -> None:
        """Add a request that begins. Raises ValueError for a known id."""
        if request_id in self._entries:
            raise ValueError(f"request {request_id} is known already; look with find() first")
        self._entries[request_id] = _Entry(fingerprint, value)

    def close(self, request_id: str, value: T, size_bytes: int = 0) -> None:
        """Mark a request as finished, so that newer finished ones may push it out.

        Nothing happens if the id is unknown or has another value.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.value is not value:
            return
        entry.done = True
        self._done[request_id] = size_bytes
        self._bytes += size_bytes
        while self._too_many():
            oldest, freed_bytes = self._done.popitem(last=False)
            self._bytes -= freed_bytes
            del self._entries[oldest]

    def forget(self, request_id: str, value: T) -> None:
        """Delete a failed or cancelled request, so that its id may be used again.

        Nothing happens if the id is unknown or has another value.
        """
        entry = self._entries.get(request_id)
        if entry is not None and entry.value is value:
            del self._entries[request_id]
            self._bytes -= self._done.pop(request_id, 0)

    @property
    def size_bytes(self) -> int:
        """Bytes of the finished requests' values, as given to `close`."""
        return self._bytes

    def _too_many(self) -> bool:
        if len(self._done) > self._capacity:
            return True
        limit = self._capacity_bytes
        return limit is not None and self._bytes > limit and len(self._done) > 1

    def __len__(self) -> int:
        return len(self._entries)

"""Request ids seen lately: a repeated request gets the first one's answer, never a second one."""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Conflict(Enum):
    """What stands against using a request id."""

    OTHER_BODY = "the request id was used with another body"


@dataclass(slots=True)
class _Entry(Generic[T]):
    fingerprint: int
    value: T
    done: bool = False


class AnswerBook(Generic[T]):
    """Values by request id; running ones are kept, of the finished ones the newest `capacity`.

    The number of running ones is the caller's to bound: its queue does.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; keep at least one answer")
        self._capacity = capacity
        self._entries: dict[str, _Entry[T]] = {}
        self._done: OrderedDict[str, None] = OrderedDict()

    def find(self, request_id: str, fingerprint: int) -> T | Conflict | None:
        """The value of an earlier request with the same id and body; None for a new one."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        return entry.value if entry.fingerprint == fingerprint else Conflict.OTHER_BODY

    def open(self, request_id: str, fingerprint: int, value: T) -> None:
        """Note a request that has begun. Raises ValueError for an id that is known."""
        if request_id in self._entries:
            raise ValueError(f"request {request_id} is known already; look with find() first")
        self._entries[request_id] = _Entry(fingerprint, value)

    def close(self, request_id: str, value: T) -> None:
        """The request is answered: keep its value until newer answers push it out.

        Nothing happens if the id was forgotten meanwhile, or opened anew with another value.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.value is not value:
            return
        entry.done = True
        self._done[request_id] = None
        while len(self._done) > self._capacity:
            oldest, _ = self._done.popitem(last=False)
            del self._entries[oldest]

    def forget(self, request_id: str, value: T) -> None:
        """The request failed or was given up: the id may be used anew. Else as `close`."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.value is value:
            del self._entries[request_id]
            self._done.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._entries)

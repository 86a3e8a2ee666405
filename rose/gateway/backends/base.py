"""Interface of a replica backend: encodes an attempt's request and reads its stream. No IO."""

from typing import Protocol

import msgspec

from elastic_scheduler import Attempt
from rose.contract.replica import StreamLine
from rose.errors import RoseError
from rose.gateway.turns.request import TurnRequest


class BackendError(RoseError):
    """A replica's stream is not in its API's shape."""


class Reader(Protocol):
    """Reads one stream."""

    def feed(self, data: bytes) -> list[StreamLine]:
        """Lines completed by `data`. Raises BackendError or msgspec.MsgspecError."""
        ...


class ReplicaBackend(Protocol):
    """One replica API; it keeps no state of its own.

    batches: whether it has a route for several turns at once.
    """

    batches: bool

    def path(self, request: TurnRequest) -> str:
        """Where a turn is asked for."""
        ...

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        """Body that asks to continue a turn. Raises BadRequest for what this API cannot do."""
        ...

    def reader(self) -> Reader:
        """A reader for one new stream."""
        ...


def fault_text(raw: msgspec.Raw) -> str:
    """An error as a replica wrote it, short enough for a log."""
    return bytes(raw)[:500].decode("utf-8", "replace")


class Lines:
    """Splits a stream at newlines; a line longer than `max_bytes` is not one."""

    __slots__ = ("_max_bytes", "_rest")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    def split(self, data: bytes) -> list[bytes]:
        """Whole lines without their ends. Raises BackendError."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > self._max_bytes:
            raise BackendError(f"a line above {self._max_bytes} bytes")
        return lines

    def events(self, data: bytes) -> list[bytes]:
        """Payloads of whole server-sent `data:` lines, without `[DONE]`."""
        found = [line[5:].strip() for line in self.split(data) if line.startswith(b"data:")]
        return [payload for payload in found if payload != b"[DONE]"]

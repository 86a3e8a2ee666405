"""Interface of a replica backend: encodes an attempt's request and reads its stream. No IO."""

from typing import Protocol

import msgspec

from elastic_scheduler import Attempt
from rose.contract.replica import StreamLine
from rose.errors import RoseError
from rose.gateway.errors import BadRequest
from rose.gateway.turn_request import TurnRequest


class BackendError(RoseError):
    """A replica's stream is not in its API's shape."""


class Reader(Protocol):
    """Reader of one stream."""

    def feed(self, data: bytes) -> list[StreamLine]:
        """Return lines completed by `data`. Raises BackendError or msgspec.MsgspecError."""
        ...


class ReplicaBackend(Protocol):
    """One replica API; it keeps no state of its own.

    batches: True if it has a route for several turns at once.
    """

    batches: bool

    def path(self, request: TurnRequest) -> str:
        """Path of a turn's request."""
        ...

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        """Return the request that continues a turn. Raises BadRequest for unsupported fields."""
        ...

    def reader(self) -> Reader:
        """Return a reader for one new stream."""
        ...


class _Fault(msgspec.Struct, gc=False):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


# A slow request, an id that the engine still knows, too many requests: not the caller's faults.
_OWN_FAULTS = frozenset({408, 409, 429})
_decode_fault = msgspec.json.Decoder(_Fault).decode


def error_line(raw: msgspec.Raw) -> StreamLine:
    """Return the last line of a stream that ends with the error object of OpenAI's API.

    Raises BadRequest if the error is the caller's.
    """
    fault = _decode_fault(raw)
    refuse(fault.code, fault.message, fault.param)
    return StreamLine(finish_reason="error", message=bytes(raw)[:500].decode("utf-8", "replace"))


def refuse(code: int | str | None, message: str | None, param: str | None = None) -> None:
    """Raise BadRequest for a status that means that the request itself is wrong."""
    if isinstance(code, int) and 400 <= code < 500 and code not in _OWN_FAULTS:
        raise BadRequest(f"refuses the turn: {message or code}", param)


class Lines:
    """Splitter of a stream at newlines; a line longer than `max_bytes` is an error."""

    __slots__ = ("_max_bytes", "_rest")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    def split(self, data: bytes) -> list[bytes]:
        """Return whole lines without their ends. Raises BackendError."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > self._max_bytes:
            raise BackendError(f"a line above {self._max_bytes} bytes")
        return lines

    def events(self, data: bytes) -> list[bytes]:
        """Return the payloads of whole server-sent `data:` lines, without `[DONE]`."""
        found = [line[5:].strip() for line in self.split(data) if line.startswith(b"data:")]
        return [payload for payload in found if payload != b"[DONE]"]

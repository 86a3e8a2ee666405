"""Interface of a replica backend: encodes an attempt's request and reads its stream. No IO."""

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from elastic_scheduler import Attempt
from rose.errors import RoseError
from rose.gateway.turns.request import TurnRequest

# What a replica can have sampled, checked as it is decoded. No vocabulary is near 2**31, though
# prompts may have ids up to 2**32, as engines take them; a logprob is at most that of 1, rounded in
# half precision.
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Logprob = Annotated[float, Meta(le=1e-2)]
Version = Annotated[int, Meta(le=(1 << 63) - 1)]


class BackendError(RoseError):
    """A replica's stream is not in its API's shape."""


class ReplicaLine(msgspec.Struct, gc=False):
    """Tokens of one version (below 0: unknown), or how the stream ends, or both.

    `oldest_version` of the KV behind the tokens, where it may be older than `version`.
    """

    token_ids: list[TokenId] = []
    logprobs: list[Logprob] = []
    version: Version = -1
    finish_reason: str | None = None
    message: str | None = None
    oldest_version: Version | None = None


class Reader(Protocol):
    """Reads one stream."""

    def feed(self, data: bytes) -> list[ReplicaLine]:
        """Lines completed by `data`. Raises BackendError or msgspec.MsgspecError."""
        ...


class ReplicaBackend(Protocol):
    """One replica API; it keeps no state of its own."""

    path: str

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

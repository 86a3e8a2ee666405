"""ROSE's own replica endpoint: `POST /rose/v1/generate`, NDJSON, every token with its version."""

import msgspec

from elastic_scheduler import Attempt
from rose.gateway.backends.base import Lines, ReplicaLine
from rose.gateway.turns.request import Sampling, TurnRequest

# A line holds one step's tokens; anything near this is not one.
MAX_LINE_BYTES = 1 << 20


class _Body(msgspec.Struct, gc=False):
    request_id: str
    token_ids: list[int]
    sampling: Sampling
    cache_salt: str | None
    priority: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ReplicaLine).decode


class RoseBackend:
    """Tokens in, stamped tokens out."""

    path = "/rose/v1/generate"

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        return _encode(
            _Body(
                request.attempt_id(attempt.number),
                attempt.token_ids,
                request.sampling.rest(attempt.max_tokens),
                request.cache_salt,
                request.priority,
            )
        )

    def reader(self) -> "_Reader":
        return _Reader()


class _Reader:
    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = Lines(MAX_LINE_BYTES)

    def feed(self, data: bytes) -> list[ReplicaLine]:
        return [_decode(line) for line in self._lines.split(data) if line]

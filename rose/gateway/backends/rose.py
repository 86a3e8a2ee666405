"""ROSE's own replica endpoint: `POST /rose/v1/generate`, NDJSON, every token with its version."""

import msgspec

from elastic_scheduler import Attempt
from rose.contract.replica import GENERATE, GENERATE_MORE, MAX_LINE_BYTES, GenerateBody, StreamLine
from rose.gateway.backends.base import Lines
from rose.gateway.turn_request import TurnRequest

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StreamLine).decode


class RoseBackend:
    """Tokens in, stamped tokens out."""

    batches = True

    def path(self, request: TurnRequest) -> str:
        return GENERATE_MORE if request.sampling.asks_more else GENERATE

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        return _encode(
            GenerateBody(
                request.attempt_id(attempt.number),
                attempt.token_ids,
                request.sampling.rest(attempt.max_tokens),
                request.salt,
                request.priority,
                request.job,
            )
        )

    def reader(self) -> "_Reader":
        return _Reader()


class _Reader:
    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = Lines(MAX_LINE_BYTES)

    def feed(self, data: bytes) -> list[StreamLine]:
        return [_decode(line) for line in self._lines.split(data) if line]

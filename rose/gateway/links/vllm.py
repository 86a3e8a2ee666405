"""A stock vLLM: `POST /inference/v1/generate`, streamed; tokens without versions.

Its priorities need a scheduling policy that a stock server does not have on, so none is sent.
"""

import msgspec

from elastic_scheduler import Attempt
from rose.gateway.links.base import Lines, LinkError, ReplicaLine
from rose.gateway.sampling import Sampling
from rose.gateway.turn_request import TurnRequest

MAX_EVENT_BYTES = 1 << 20


class _SamplingBody(Sampling, gc=False, kw_only=True):
    logprobs: int = 0
    detokenize: bool = False


class _Body(msgspec.Struct, gc=False, omit_defaults=True):
    request_id: str
    token_ids: list[int]
    sampling_params: _SamplingBody
    stream: bool
    cache_salt: str | None = None


class _TokenLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"")


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Event).decode


class VllmLink:
    """Tokens in, tokens out."""

    path = "/inference/v1/generate"

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        """The attempt's request id is unique: an engine refuses one that it knows."""
        rest = request.sampling.rest(attempt.max_tokens)
        sampling = _SamplingBody(
            **{field: getattr(rest, field) for field in Sampling.__struct_fields__}
        )
        name = f"{request.request_id}.{attempt.number}"
        return _encode(_Body(name, attempt.token_ids, sampling, True, request.cache_salt))

    def reader(self) -> "_Reader":
        """A reader for one new stream."""
        return _Reader()


class _Reader:
    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = Lines(MAX_EVENT_BYTES)

    def feed(self, data: bytes) -> list[ReplicaLine]:
        return [_line(_decode(event)) for event in self._lines.events(data)]


def _line(event: _Event) -> ReplicaLine:
    if bytes(event.error):
        return ReplicaLine(finish_reason="error", message=bytes(event.error).decode()[:500])
    if not event.choices:
        return ReplicaLine()
    choice = event.choices[0]
    tokens = choice.token_ids or []
    content = choice.logprobs.content if choice.logprobs is not None else None
    logprobs = [token.logprob for token in content or ()]
    if len(logprobs) != len(tokens):
        raise LinkError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
    return ReplicaLine(tokens, logprobs, -1, choice.finish_reason)

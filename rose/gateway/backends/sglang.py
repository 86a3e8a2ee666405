"""A stock SGLang: `POST /generate`, streamed; tokens without versions.

By default each event repeats the whole output so far, with `--incremental-streaming-output` it has
only the new part: `completion_tokens` tells the two apart.
"""

import msgspec

from elastic_scheduler import Attempt
from rose.contract.fields import Logprob, SampledId
from rose.contract.replica import Sampling, StreamLine, StructuredOutputs
from rose.gateway.backends.base import BackendError, Lines, error_line, refuse
from rose.gateway.errors import BadRequest
from rose.gateway.turn_request import TurnRequest

# An event may hold a whole long output with its logprobs.
MAX_EVENT_BYTES = 32 << 20
PATH = "/generate"


class _SamplingBody(msgspec.Struct, gc=False, omit_defaults=True):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool = False
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    json_schema: str | None = None
    regex: str | None = None


class _Body(msgspec.Struct, gc=False):
    rid: str
    input_ids: list[int]
    sampling_params: _SamplingBody
    return_logprob: bool = True
    logprob_start_len: int = -1
    stream: bool = True


class _Finish(msgspec.Struct, gc=False):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct, gc=False):
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[Logprob | None, int, object]] = []
    finish_reason: _Finish | None = None


class _Event(msgspec.Struct, gc=False):
    output_ids: list[SampledId] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: msgspec.Raw = msgspec.Raw(b"")


ANY_OBJECT = '{"type": "object"}'
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Event).decode


class SglangBackend:
    """Tokens in, tokens out."""

    batches = False

    def path(self, request: TurnRequest) -> str:
        return PATH

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        """Raises BadRequest for fields that SGLang has no parameter for."""
        rest = request.sampling.rest(attempt.max_tokens)
        _refuse(request.sampling)
        wish = rest.structured_outputs or StructuredOutputs()
        sampling = _SamplingBody(
            rest.max_tokens,
            rest.temperature,
            rest.top_p,
            rest.top_k or -1,
            rest.min_tokens,
            rest.stop_token_ids,
            rest.seed,
            True,
            rest.min_p,
            rest.frequency_penalty,
            rest.presence_penalty,
            rest.ignore_eos,
            wish.json or (ANY_OBJECT if wish.json_object else None),
            wish.regex,
        )
        rid = request.attempt_id(attempt.number)
        return _encode(_Body(rid, attempt.token_ids, sampling))

    def reader(self) -> "_Reader":
        return _Reader()


def _refuse(asked: Sampling) -> None:
    """Raise BadRequest for fields that SGLang has no equal parameter for."""
    if asked.allowed_token_ids is not None:
        raise BadRequest("allowed_token_ids: an SGLang replica cannot restrict the sampling")
    if asked.repetition_penalty != 1.0:
        # Some of its versions count the output alone.
        raise BadRequest(
            "repetition_penalty: an SGLang replica counts other tokens than vLLM; leave it out",
            "repetition_penalty",
        )
    if asked.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: an SGLang replica gives none here", "prompt_logprobs")
    wish = asked.structured_outputs
    if wish is not None and not (wish.json or wish.regex or wish.json_object):
        raise BadRequest(
            "structured_outputs: an SGLang replica knows json, json_object and regex alone",
            "structured_outputs",
        )


class _Reader:
    __slots__ = ("_lines", "_seen")

    def __init__(self) -> None:
        self._lines = Lines(MAX_EVENT_BYTES)
        self._seen = 0

    def feed(self, data: bytes) -> list[StreamLine]:
        return [self._line(_decode(event)) for event in self._lines.events(data)]

    def _line(self, event: _Event) -> StreamLine:
        if bytes(event.error):
            return error_line(event.error)
        meta = event.meta_info
        new = meta.completion_tokens - self._seen
        if not 0 <= new <= min(len(event.output_ids), len(meta.output_token_logprobs)):
            raise BackendError(f"{new} new tokens, but not as many ids and logprobs")
        self._seen += new
        tokens = event.output_ids[len(event.output_ids) - new :]
        rows = meta.output_token_logprobs[len(meta.output_token_logprobs) - new :]
        if [row[1] for row in rows] != tokens:
            raise BackendError("its logprobs are of other tokens than its output")
        finish = meta.finish_reason
        if finish is not None:
            refuse(finish.status_code, finish.message)
        return StreamLine(
            tokens,
            [float("nan") if row[0] is None else row[0] for row in rows],
            finish_reason=None if finish is None else finish.type,
            message=None if finish is None else finish.message,
        )

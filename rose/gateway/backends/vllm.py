"""A stock vLLM: `POST /v1/completions` with token ids, streamed; tokens without versions.

Its tokens-in-tokens-out route would fit better, but a server has it only with `--enable-scale-out`;
this one every vLLM since 0.10.2 has. Its priorities need a scheduling policy that a stock server
does not have on, so none is sent. Omitted fields would come from the model's generation config.
"""

import msgspec

from elastic_scheduler import Attempt
from rose.contract.fields import Logprob, SampledId
from rose.contract.replica import StreamLine, StructuredOutputs
from rose.gateway.backends.base import BackendError, Lines, error_line
from rose.gateway.errors import BadRequest
from rose.gateway.turn_request import TurnRequest

MAX_EVENT_BYTES = 1 << 20
PATH = "/v1/completions"


class _Body(msgspec.Struct, gc=False):
    prompt: list[int]
    request_id: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    allowed_token_ids: tuple[int, ...] | None
    seed: int | None
    cache_salt: str | None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    logprobs: int = 0
    return_token_ids: bool = True
    return_tokens_as_token_ids: bool = True
    stream: bool = True
    structured_outputs: StructuredOutputs | None = None


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[Logprob | None] = []


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[SampledId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"")


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Event).decode


class VllmBackend:
    """Tokens in, tokens out."""

    batches = False

    def path(self, request: TurnRequest) -> str:
        return PATH

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        """Raises BadRequest for what vLLM does not do in a stream."""
        if request.sampling.prompt_logprobs is not None:
            raise BadRequest(
                "prompt_logprobs: a stock vLLM replica gives none in a stream; use one of ROSE",
                "prompt_logprobs",
            )
        rest = request.sampling.rest(attempt.max_tokens)
        return _encode(
            _Body(
                attempt.token_ids,
                request.attempt_id(attempt.number),
                rest.max_tokens,
                rest.temperature,
                rest.top_p,
                rest.top_k,
                rest.min_tokens,
                rest.stop_token_ids or (),
                rest.allowed_token_ids,
                rest.seed,
                request.cache_salt,
                rest.min_p,
                rest.presence_penalty,
                rest.frequency_penalty,
                rest.repetition_penalty,
                rest.ignore_eos,
                structured_outputs=rest.structured_outputs,
            )
        )

    def reader(self) -> "_Reader":
        return _Reader()


class _Reader:
    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines = Lines(MAX_EVENT_BYTES)

    def feed(self, data: bytes) -> list[StreamLine]:
        return [_line(_decode(event)) for event in self._lines.events(data)]


def _line(event: _Event) -> StreamLine:
    if bytes(event.error):
        return error_line(event.error)
    if not event.choices:
        return StreamLine()
    choice = event.choices[0]
    tokens = choice.token_ids or []
    given = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    logprobs = [float("nan") if logprob is None else logprob for logprob in given]
    if len(logprobs) != len(tokens):
        raise BackendError(
            f"{len(tokens)} token ids came with {len(logprobs)} logprobs; "
            "vLLM sends both since version 0.10.2"
        )
    return StreamLine(tokens, logprobs, finish_reason=choice.finish_reason)

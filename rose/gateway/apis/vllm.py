"""vLLM's tokens in, tokens out: `POST /inference/v1/generate`, as vLLM 0.32 reads and writes it.

Fields that vLLM does not have: `min_version`, `exact_version`, `timeout_s`, `resume_from` in;
`versions`, `segments`, `attempts` out. The request id is returned as it was sent.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from rose.contract.gateway import GENERATE, AnswerFields, TurnFields, Version, versions_of
from rose.contract.replica import Sampling
from rose.gateway.apis import wire
from rose.gateway.apis.frontend import ApiRequest, check_samples
from rose.gateway.apis.structured import StructuredBody, structured_of
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.request_limits import resume_of, timeout_of
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.request import (
    NOTHING,
    TurnRequest,
    origin_of,
    refuse_unsupported,
    sample_of,
)
from rose.gateway.turns.token_stream import TokenStream

NEUTRAL_SAMPLING: Mapping[str, object] = {
    "stop": None,
    "prompt_logprob_token_ids": None,
    "logprob_token_ids": None,
    "logit_bias": None,
    "bad_words": None,
    "watermarking": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "trace_decode_token_ids": None,
    "extra_args": None,
}
NEUTRAL: Mapping[str, object] = {
    "features": None,
    "content_parts": None,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "output_mode": "tokens",
}


class _SamplingBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    max_tokens: int | None = None
    min_tokens: int | None = 0
    stop_token_ids: tuple[int, ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int | None = 1
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_p: float | None = 0.0
    stop: str | list[str] | None = None
    ignore_eos: bool | None = False
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: msgspec.Raw = NOTHING
    logprob_token_ids: list[int] | None = None
    structured_outputs: StructuredBody | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    watermarking: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: msgspec.Raw = NOTHING
    trace_decode_token_ids: msgspec.Raw = NOTHING
    # Options of delivery or caching, not of sampling: tokens come as they come.
    flat_logprobs: msgspec.Raw = NOTHING
    prompt_logprob_start: msgspec.Raw = NOTHING
    detokenize: msgspec.Raw = NOTHING
    skip_special_tokens: msgspec.Raw = NOTHING
    spaces_between_special_tokens: msgspec.Raw = NOTHING
    include_stop_str_in_output: msgspec.Raw = NOTHING
    output_kind: msgspec.Raw = NOTHING
    stream_interval: msgspec.Raw = NOTHING
    skip_clone: msgspec.Raw = NOTHING
    skip_reading_prefix_cache: msgspec.Raw = NOTHING
    routed_experts_prompt_start: msgspec.Raw = NOTHING
    extra_args: msgspec.Raw = NOTHING

    def sampling(self, max_tokens: int) -> Sampling:
        return Sampling(
            1.0 if self.temperature is None else self.temperature,
            1.0 if self.top_p is None else self.top_p,
            self.top_k or 0,
            max_tokens,
            self.min_tokens or 0,
            self.stop_token_ids,
            self.allowed_token_ids,
            self.seed,
            self.min_p or 0.0,
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
            self.frequency_penalty or 0.0,
            self.presence_penalty or 0.0,
            bool(self.ignore_eos),
            self.prompt_logprobs,
            structured_of(self.structured_outputs, NOTHING),
        )


class _Body(TurnFields, gc=False, kw_only=True):
    token_ids: list[int]
    sampling_params: _SamplingBody = msgspec.field(default_factory=_SamplingBody)
    request_id: str | None = None
    model: str | None = None
    stream_options: wire.StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    return_token_ids: bool | None = None
    features: msgspec.Raw = NOTHING
    content_parts: msgspec.Raw = NOTHING
    kv_transfer_params: msgspec.Raw = NOTHING
    ec_transfer_params: msgspec.Raw = NOTHING
    output_mode: str = "tokens"


_decoder = msgspec.json.Decoder(_Body)


class VllmFrontend:
    """Reader of requests; `VllmAnswer` writes."""

    path = GENERATE

    def __init__(self, model: ServedModel, max_completions: int) -> None:
        self._model = model
        self._max_completions = max_completions

    async def read(self, body: bytes, headers: Mapping[str, str]) -> ApiRequest:
        asked = wire.read_json(_decoder, body)
        self._model.check_name(asked.model)
        params = asked.sampling_params
        refuse_unsupported(asked, NEUTRAL)
        refuse_unsupported(params, NEUTRAL_SAMPLING)
        _check_logprobs(params.logprobs)
        wire.check_prompt_logprobs(params.prompt_logprobs, asked.stream)
        samples = 1 if params.n is None else params.n
        check_samples(samples, self._max_completions, params.temperature)
        self._model.check_length(len(asked.token_ids))
        name, named = wire.request_id_of(headers, asked.request_id)
        sampling = params.sampling(self._model.budget(len(asked.token_ids), params.max_tokens))
        origin = origin_of(headers, asked)
        turns = [
            TurnRequest(
                request_id=name if samples == 1 else f"{name}-{index}",
                token_ids=asked.token_ids,
                sampling=sample_of(sampling, index),
                origin=origin,
                min_version=asked.min_version,
                exact_version=asked.exact_version,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                timeout_s=timeout_of(headers, asked.timeout_s),
                named=named,
                batch=samples > 1,
            )
            for index in range(samples)
        ]
        start, event_ids = resume_of(headers, asked.resume_from)
        answer = VllmAnswer(name, self._model.name, asked)
        return ApiRequest(turns, bool(asked.stream), answer, start, event_ids)

    def error(self, error: TurnError) -> bytes:
        return wire.vllm_error(error)

    def broken(self, error: TurnError) -> bytes:
        return wire.event(wire.vllm_error(error)) + wire.DONE


class _TopLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: int | None


class _TokenLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[_TopLogprob]


class _NamedLogprob(_TokenLogprob, gc=False, kw_only=True):
    # The token's name in vLLM before 0.32, which the `renderers` client of verifiers requires.
    token: str


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_TokenLogprob]


class _WeightVersion(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    routed_experts: None
    sampling_mask: None
    weight_versions: list[_WeightVersion] | None
    logprobs: _Logprobs | None


class _Whole(AnswerFields, gc=False):
    request_id: str
    model: str
    created: int
    usage: wire.TokenUsage
    prompt_logprobs: wire.PromptPlaces | None
    prompt_token_id_logprobs: None
    prompt_token_ids: list[int] | None
    mm_placeholders: None
    metrics: None
    kv_transfer_params: None
    ec_transfer_params: None
    output_mode: str
    choices: list[msgspec.Raw]


class _Chunk(msgspec.Struct, gc=False):
    request_id: str
    usage: wire.TokenUsage | None
    output_mode: str
    choices: list[_Choice]
    versions: list[Version]


class _FirstChunk(_Chunk, gc=False, kw_only=True):
    prompt_token_ids: list[int]


class _LastChunk(AnswerFields, gc=False):
    request_id: str
    usage: wire.TokenUsage | None
    output_mode: str
    choices: list[_Choice]


class _UsageChunk(msgspec.Struct, gc=False):
    request_id: str
    usage: wire.ShortUsage
    output_mode: str
    choices: list[_Choice]


class VllmAnswer:
    """Writer of one request's turns.

    With several samples `versions` and `segments` are the first's; each choice has its own
    `weight_versions`.
    """

    def __init__(self, request_id: str, model: str, asked: _Body) -> None:
        options = asked.stream_options or wire.StreamOptions()
        self._request_id = request_id
        self._model = model
        self._logprobs = asked.sampling_params.logprobs is not None
        self._prompt = asked.token_ids if asked.return_token_ids else None
        self._prompt_tokens = len(asked.token_ids)
        self._usage_at_end = options.at_end
        self._usage_always = options.always
        self._choices: list[msgspec.Raw] = []

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        self._choices = await wire.written(
            streams,
            lambda index, stream: self._choice(
                index, stream, 0, len(stream.tokens), _named_logprob
            ),
        )

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        first = streams[0]
        return wire.encode(
            _Whole(
                self._request_id,
                self._model,
                first.created,
                wire.TokenUsage(*wire.usage(streams, [self._prompt_tokens])),
                wire.prompt_places(first),
                None,
                self._prompt,
                None,
                None,
                None,
                None,
                "tokens",
                self._choices,
                versions=versions_of(first.versions),
                segments=first.segments,
                attempts=sum(stream.attempts for stream in streams),
            )
        )

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        del streams
        return b""

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        choice = self._choice(index, stream, start, end, _token_logprob)
        head = (self._request_id, self._usage(stream, end), "tokens", [choice])
        spans = versions_of(stream.spans(start, end))
        if choice.finish_reason is not None:
            last = _LastChunk(
                *head, versions=spans, segments=stream.segments, attempts=stream.attempts
            )
            return wire.event(wire.encode(last))
        if self._prompt is not None and start == 0:
            prompt = self._prompt
            return wire.event(wire.encode(_FirstChunk(*head, spans, prompt_token_ids=prompt)))
        return wire.event(wire.encode(_Chunk(*head, spans)))

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        if not self._usage_at_end:
            return wire.DONE
        counts = wire.ShortUsage(*wire.usage(streams, [self._prompt_tokens]))
        chunk = _UsageChunk(self._request_id, counts, "tokens", [])
        return wire.event(wire.encode(chunk)) + wire.DONE

    def _usage(self, stream: TokenStream, end: int) -> wire.TokenUsage | None:
        if not self._usage_always:
            return None
        return wire.TokenUsage(stream.prompt_tokens, stream.prompt_tokens + end, end)

    def _choice(
        self,
        index: int,
        stream: TokenStream,
        start: int,
        end: int,
        logprob_of: Callable[[int, float], _TokenLogprob],
    ) -> _Choice:
        tokens = stream.tokens[start:end].tolist()
        over = stream.finish_reason is not None and end == len(stream.tokens)
        logprobs = None
        if self._logprobs:
            values = wire.finite(stream.logprobs[start:end])
            logprobs = _Logprobs([*map(logprob_of, tokens, values)])
        return _Choice(
            index,
            stream.finish_reason if over else None,
            stream.stop_reason if over else None,
            tokens,
            None,
            None,
            _weight_versions(stream) if over else None,
            logprobs,
        )


def _token_logprob(token: int, logprob: float) -> _TokenLogprob:
    return _TokenLogprob(token, logprob, None, [_TopLogprob(token, logprob, None)])


def _named_logprob(token: int, logprob: float) -> _TokenLogprob:
    top = [_TopLogprob(token, logprob, None)]
    return _NamedLogprob(token, logprob, None, top, token=f"token_id:{token}")


def _weight_versions(stream: TokenStream) -> list[_WeightVersion] | None:
    spans = [_WeightVersion(str(span.version), span.start, span.end) for span in stream.versions]
    return spans or None


def _check_logprobs(logprobs: int | None) -> None:
    if logprobs is not None and not 0 <= logprobs <= 1:
        raise BadRequest(
            f"logprobs is {logprobs}: rollout replicas give the sampled token's only; send 0 or 1",
            "logprobs",
        )

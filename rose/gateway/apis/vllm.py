"""vLLM's tokens in, tokens out: `POST /inference/v1/generate`, as vLLM 0.32 reads and writes it.

Fields that vLLM does not have: `min_version`, `exact_version`, `timeout_s`, `resume_from`, `images`
in; `versions`, `segments`, `attempts` out. The request id is returned as it was sent.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import structs

from elastic_scheduler import Segment
from rose.contract.gateway import GENERATE, ImageName, TopLogprobs, Version, versions_of
from rose.contract.replica import Sampling, sampling_of
from rose.gateway.apis import frontend, wire
from rose.gateway.apis.frontend import NOTHING, ApiFrontend, ApiRequest, GenerateFields
from rose.gateway.apis.structured import StructuredBody, structured_of
from rose.gateway.turns.token_stream import TokenStream
from rose.security.callers import ANYBODY, Caller


class _VllmUnsupportedSampling(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    stop: str | list[str] | None = None
    prompt_logprob_token_ids: msgspec.Raw = NOTHING
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    watermarking: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: msgspec.Raw = NOTHING
    trace_decode_token_ids: msgspec.Raw = NOTHING
    extra_args: msgspec.Raw = NOTHING


class _VllmSamplingBody(_VllmUnsupportedSampling, gc=False):
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
    ignore_eos: bool | None = False
    deterministic: bool | None = False
    prompt_logprobs: int | None = None
    structured_outputs: StructuredBody | None = None
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
    routed_experts_prompt_start: int | None = None

    def sampling(self, max_tokens: int, most: int) -> Sampling:
        structured = structured_of(self.structured_outputs, NOTHING)
        own = {"max_tokens": max_tokens, "structured_outputs": structured, "logprobs": most}
        return sampling_of({**structs.asdict(self), **own})


class _VllmUnsupported(GenerateFields, gc=False, kw_only=True):
    features: msgspec.Raw = NOTHING
    content_parts: msgspec.Raw = NOTHING
    kv_transfer_params: msgspec.Raw = NOTHING
    ec_transfer_params: msgspec.Raw = NOTHING
    output_mode: str = "tokens"


class _VllmBody(_VllmUnsupported, gc=False, kw_only=True):
    token_ids: list[int]
    sampling_params: _VllmSamplingBody = msgspec.field(default_factory=_VllmSamplingBody)
    stream_options: wire.StreamOptions | None = None
    return_token_ids: bool | None = None
    packed: bool | None = None
    images: list[bytes | ImageName] | None = None


_decoder = msgspec.json.Decoder(_VllmBody)


class VllmFrontend(ApiFrontend):
    """Frontend of vLLM's `/inference/v1/generate`: it reads requests; `VllmAnswer` writes the
    answers.
    """

    path = GENERATE

    async def read(
        self, body: bytes, headers: Mapping[str, str], caller: Caller = ANYBODY
    ) -> ApiRequest:
        asked = frontend.read_json(_decoder, body)
        self._model.check_name(asked.model)
        params, prompt = asked.sampling_params, asked.token_ids
        frontend.refuse_unsupported(asked, _VllmUnsupported)
        frontend.refuse_unsupported(params, _VllmUnsupportedSampling)
        most = frontend.most_likely(params.logprobs, "logprobs", counts_sampled=not asked.packed)
        frontend.check_prompt_logprobs(params.prompt_logprobs, asked.stream)
        samples = 1 if params.n is None else params.n
        frontend.check_samples(samples, self._max_completions, params.temperature)
        self._model.check_length(len(prompt))
        name = frontend.request_id_of(headers, asked.request_id)
        sampling = params.sampling(self._model.budget(len(prompt), params.max_tokens), most)
        images = await self._taken(asked.images, asked, headers, caller) if asked.images else ()
        turns = frontend.turns_of(
            asked, headers, name, [prompt], sampling, samples=samples, images=images
        )
        return frontend.request_of(
            asked, headers, turns, VllmAnswer(name[0], self._model.name, asked, most)
        )


class _VllmTopLogprob(msgspec.Struct, gc=False):
    token_id: int
    logprob: float
    rank: None = None


class _VllmTokenLogprob(_VllmTopLogprob, gc=False, kw_only=True):
    top_logprobs: list[_VllmTopLogprob]


class _NamedLogprob(_VllmTokenLogprob, gc=False, kw_only=True):
    # The token's name in vLLM before 0.32, which the `renderers` client of verifiers requires.
    token: str


class _VllmTokenLogprobs(msgspec.Struct, gc=False):
    content: list[_VllmTokenLogprob]


class _WeightVersion(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _VllmOutput(msgspec.Struct, gc=False, kw_only=True):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    routed_experts: bytes | None = None
    sampling_mask: None = None
    weight_versions: list[_WeightVersion] | None
    logprobs: _VllmTokenLogprobs | None
    top_logprobs: TopLogprobs | msgspec.UnsetType = msgspec.UNSET


class _VllmWhole(msgspec.Struct, gc=False, kw_only=True):
    request_id: str
    model: str
    created: int
    usage: wire.TokenUsage
    prompt_logprobs: wire.PromptPlaces | None
    prompt_token_id_logprobs: None = None
    prompt_token_ids: list[int] | None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    output_mode: str = "tokens"
    choices: list[msgspec.Raw]
    versions: list[Version]
    segments: tuple[Segment, ...]
    attempts: int


class _VllmChunk(msgspec.Struct, gc=False, kw_only=True):
    request_id: str
    usage: wire.ShortUsage | None
    output_mode: str = "tokens"
    choices: list[_VllmOutput]


class _TokensChunk(_VllmChunk, gc=False, kw_only=True):
    versions: list[Version]
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class _LastChunk(_TokensChunk, gc=False, kw_only=True):
    segments: tuple[Segment, ...]
    attempts: int


class VllmAnswer(wire.ApiResponse):
    """Writer of a token answer in vLLM's form, whole or streamed.

    With several samples `versions` and `segments` are the first's; each choice has its own
    `weight_versions`.
    """

    def __init__(self, request_id: str, model: str, asked: _VllmBody, most: int) -> None:
        self._packed = most if asked.packed else 0
        super().__init__(asked.stream_options, len(asked.token_ids), most - self._packed)
        self._request_id = request_id
        self._model = model
        self._logprobs = asked.sampling_params.logprobs is not None
        self._prompt = asked.token_ids if asked.return_token_ids else None

    def choice(self, index: int, stream: TokenStream) -> _VllmOutput:
        return self._choice(index, stream, 0, len(stream.tokens), _named_logprob)

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        first = streams[0]
        return wire.encode(
            _VllmWhole(
                request_id=self._request_id,
                model=self._model,
                created=first.created,
                usage=wire.TokenUsage(*self.usage(streams)),
                prompt_logprobs=wire.prompt_places(first),
                prompt_token_ids=self._prompt and (first.expanded or self._prompt),
                choices=self._choices,
                versions=versions_of(first.versions),
                segments=first.segments,
                attempts=sum(stream.attempts for stream in streams),
            )
        )

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        choice = self._choice(index, stream, start, end, _token_logprob)
        counts = self.usage_so_far(stream, end)
        chunk: _VllmChunk
        prompt = self._prompt and (stream.expanded or self._prompt) if start == 0 else None
        usage = None if counts is None else wire.TokenUsage(*counts)
        spans = versions_of(stream.spans(start, end))
        if choice.finish_reason is not None:
            chunk = _LastChunk(
                request_id=self._request_id,
                usage=usage,
                choices=[choice],
                versions=spans,
                prompt_token_ids=msgspec.UNSET if prompt is None else prompt,
                segments=stream.segments,
                attempts=stream.attempts,
            )
        else:
            chunk = _TokensChunk(
                request_id=self._request_id,
                usage=usage,
                choices=[choice],
                versions=spans,
                prompt_token_ids=msgspec.UNSET if prompt is None else prompt,
            )
        return wire.event(wire.encode(chunk))

    def counts(self, stream: TokenStream, usage: wire.ShortUsage) -> _VllmChunk:
        return _VllmChunk(request_id=self._request_id, usage=usage, choices=[])

    def _choice(
        self,
        index: int,
        stream: TokenStream,
        start: int,
        end: int,
        logprob_of: Callable[[int, float], _VllmTokenLogprob],
    ) -> _VllmOutput:
        tokens = stream.tokens[start:end].tolist()
        over = wire.is_over(stream, end)
        logprobs = None
        if self._logprobs:
            values = wire.finite(stream.logprobs[start:end])
            logprobs = _VllmTokenLogprobs([*map(logprob_of, tokens, values)])
            if self._most:
                self._add_others(logprobs, stream, start, end)
        return _VllmOutput(
            index=index,
            finish_reason=stream.finish_reason if over else None,
            stop_reason=stream.stop_reason if over else None,
            token_ids=tokens,
            routed_experts=wire.routed_experts(stream) if over else None,
            weight_versions=_weight_versions(stream) if over else None,
            logprobs=logprobs,
            top_logprobs=TopLogprobs(self._packed, stream.top_logprobs(start, end, self._packed))
            if self._packed
            else msgspec.UNSET,
        )

    def _add_others(
        self, logprobs: _VllmTokenLogprobs, stream: TokenStream, start: int, end: int
    ) -> None:
        """Add the most likely tokens to each token's list, in which the token itself counts."""
        for token, place in zip(
            logprobs.content, wire.beside(stream, start, end, self._most), strict=True
        ):
            others = place[1 : self._most]
            token.top_logprobs += [_VllmTopLogprob(other, value) for other, value in others]


def _token_logprob(token: int, logprob: float) -> _VllmTokenLogprob:
    return _VllmTokenLogprob(token, logprob, top_logprobs=[_VllmTopLogprob(token, logprob)])


def _named_logprob(token: int, logprob: float) -> _VllmTokenLogprob:
    top = [_VllmTopLogprob(token, logprob)]
    return _NamedLogprob(token, logprob, top_logprobs=top, token=f"token_id:{token}")


def _weight_versions(stream: TokenStream) -> list[_WeightVersion] | None:
    spans = [_WeightVersion(str(span.version), span.start, span.end) for span in stream.versions]
    return spans or None

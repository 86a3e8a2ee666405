"""OpenAI's `POST /v1/completions`, as vLLM 0.32 reads and writes it; fields shared with chat.

Prompts are texts (with a tokenizer) or token ids, one or many. Fields of ROSE: `min_version`,
`exact_version`, `timeout_s`, `resume_from` in; `versions` in every choice out.
"""

from collections.abc import Mapping, Sequence

import msgspec

from rose.contract.gateway import TurnFields, Version, versions_of
from rose.contract.replica import Sampling, StructuredOutputs
from rose.gateway.apis import wire
from rose.gateway.apis.frontend import ApiRequest, check_completions, check_samples
from rose.gateway.apis.structured import StructuredBody, structured_of
from rose.gateway.apis.wire import StreamOptions
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.request_limits import resume_of, timeout_of
from rose.gateway.text_codec import ServedModel, TextPlan, TextTrack
from rose.gateway.turns.request import (
    NOTHING,
    TurnRequest,
    origin_of,
    refuse_unsupported,
    sample_of,
)
from rose.gateway.turns.token_stream import TokenStream

MAX_STOPS = 256
MAX_STOP_CHARS = 4_096
NEUTRAL: Mapping[str, object] = {
    "use_beam_search": False,
    "logprob_token_ids": None,
    "logit_bias": None,
    "bad_words": None,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "echo": False,
    "best_of": 1,
    "logits_processors": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "watermarking": False,
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
    "prompt_embeds": None,
    "return_token_offsets": False,
    "routed_experts_prompt_start": 0,
    "return_mm_kwargs": False,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "vllm_xargs": None,
}


class OpenAIBody(TurnFields, gc=False):
    """Fields of both routes; others are ignored, as OpenAI's own clients expect."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_p: float | None = 0.0
    ignore_eos: bool | None = False
    use_beam_search: bool | None = False
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    structured_outputs: StructuredBody | None = None
    response_format: msgspec.Raw = NOTHING
    guided_json: msgspec.Raw = NOTHING
    guided_regex: msgspec.Raw = NOTHING
    guided_choice: msgspec.Raw = NOTHING
    guided_grammar: msgspec.Raw = NOTHING
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    echo: bool | None = False
    best_of: int | None = None
    logits_processors: msgspec.Raw = NOTHING
    thinking_token_budget: int | None = None
    repetition_detection: msgspec.Raw = NOTHING
    watermarking: bool | None = None
    spaces_between_special_tokens: bool | None = True
    stream_interval: int | None = None
    prompt_embeds: msgspec.Raw = NOTHING
    return_token_offsets: bool | None = False
    routed_experts_prompt_start: int | None = 0
    return_mm_kwargs: bool | None = None
    kv_transfer_params: msgspec.Raw = NOTHING
    ec_transfer_params: msgspec.Raw = NOTHING
    vllm_xargs: msgspec.Raw = NOTHING

    def check(self, most: int) -> None:
        """Raise BadRequest for fields that replicas cannot honour, and for over `most` samples."""
        refuse_unsupported(self, NEUTRAL)
        wire.check_prompt_logprobs(self.prompt_logprobs, self.stream)
        check_samples(self.samples, most, self.temperature)
        check_stops(self.stops)
        if not self.stream and self.stream_options not in (None, StreamOptions()):
            raise BadRequest("stream_options is for streams: send stream", "stream_options")

    @property
    def samples(self) -> int:
        """Number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_tokens: int) -> Sampling:
        return Sampling(
            1.0 if self.temperature is None else self.temperature,
            1.0 if self.top_p is None else self.top_p,
            self.top_k or 0,
            max_tokens,
            self.min_tokens or 0,
            self.stop_token_ids or None,
            self.allowed_token_ids,
            self.seed,
            self.min_p or 0.0,
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
            self.frequency_penalty or 0.0,
            self.presence_penalty or 0.0,
            bool(self.ignore_eos),
            self.prompt_logprobs,
            self.structured(),
        )

    def structured(self) -> StructuredOutputs | None:
        """Return the output's constraint. Raises BadRequest."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return structured_of(self.structured_outputs, self.response_format, guided)

    def text_plan(self, model: ServedModel) -> TextPlan | None:
        """Return the plan of output as text. Raises BadRequest for stops without a tokenizer."""
        if self.stops:
            model.need_codec("a stop string")
        if model.codec is None:
            return None
        return TextPlan(
            model.codec,
            self.stops,
            bool(self.include_stop_str_in_output),
            self.skip_special_tokens is not False,
            self.min_tokens or 0,
        )


def check_stops(stops: tuple[str, ...]) -> None:
    """Raise BadRequest for more stop strings than can be searched for at every token."""
    chars = sum(map(len, stops))
    if len(stops) > MAX_STOPS or chars > MAX_STOP_CHARS or not all(stops):
        raise BadRequest(
            f"stop: at most {MAX_STOPS} strings of together {MAX_STOP_CHARS} characters, "
            "none of them empty",
            "stop",
        )


def check_top_logprobs(given: int | None, name: str) -> None:
    """Raise BadRequest for alternatives to the sampled token, which no replica reports."""
    if given is not None and not 0 <= given <= 1:
        raise BadRequest(
            f"{name} is {given}: rollout replicas give the sampled token's logprob only; "
            "send 0 or 1",
            name,
        )


def token_text(
    model: ServedModel, token_ids: Sequence[int], place: int, as_ids: bool | None
) -> str:
    """Return a token for a list of logprobs: its text, or `token_id:N` as vLLM writes it."""
    if as_ids or model.codec is None:
        return f"token_id:{token_ids[place]}"
    return model.codec.token_text(token_ids, place)


def text_between(track: TextTrack | None, start: int, end: int, over: bool) -> str:
    """Return the output text that tokens [start, end) settle; empty without a tokenizer."""
    if track is None:
        return ""
    return track.text[track.shown(start, False) : track.shown(end, over)]


DEFAULT_MAX_TOKENS = 16


class _Body(OpenAIBody, gc=False, kw_only=True):
    n: int = 1
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True


_decoder = msgspec.json.Decoder(_Body)


class CompletionFrontend:
    """Reader of requests; `CompletionAnswer` writes."""

    path = "/v1/completions"

    def __init__(self, model: ServedModel, max_completions: int) -> None:
        self._model = model
        self._max_completions = max_completions

    async def read(self, body: bytes, headers: Mapping[str, str]) -> ApiRequest:
        asked = wire.read_json(_decoder, body)
        self._model.check_name(asked.model)
        asked.check(self._max_completions)
        check_top_logprobs(asked.logprobs, "logprobs")
        if asked.suffix:
            raise BadRequest("suffix is not supported", "suffix")
        prompts = await self._prompts(asked)
        samples = asked.samples
        check_completions(len(prompts) * samples, self._max_completions, "prompt")
        name, named = wire.request_id_of(headers, asked.request_id)
        origin, turns = origin_of(headers, asked), []
        max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        sampling, plan = asked.sampling(max_tokens), asked.text_plan(self._model)
        for k, prompt in enumerate(prompts):
            self._model.check_length(len(prompt), max_tokens)
            for index in range(samples):
                single = len(prompts) * samples == 1
                turn = TurnRequest(
                    request_id=name if single else f"{name}-{k * samples + index}",
                    token_ids=prompt,
                    sampling=sample_of(sampling, index),
                    origin=origin,
                    min_version=asked.min_version,
                    exact_version=asked.exact_version,
                    priority=asked.priority,
                    cache_salt=asked.cache_salt,
                    timeout_s=timeout_of(headers, asked.timeout_s),
                    named=named,
                    text=plan,
                    batch=not single,
                )
                turns.append(turn)
        start, event_ids = resume_of(headers, asked.resume_from)
        answer = CompletionAnswer(f"cmpl-{name}", self._model, asked, prompts)
        return ApiRequest(turns, bool(asked.stream), answer, start, event_ids)

    def error(self, error: TurnError) -> bytes:
        return wire.vllm_error(error)

    def broken(self, error: TurnError) -> bytes:
        return wire.event(wire.vllm_error(error)) + wire.DONE

    async def _prompts(self, asked: _Body) -> list[list[int]]:
        prompt = asked.prompt
        if prompt is None or not prompt:
            raise BadRequest("prompt is missing or empty", "prompt")
        if isinstance(prompt, str):
            return await self._encode([prompt], asked)
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) == len(prompt):
            return [ids]
        check_completions(len(prompt), self._max_completions, "prompt")
        lists = [part for part in prompt if isinstance(part, list)]
        if len(lists) == len(prompt):
            return lists
        if ids or lists:
            raise BadRequest("prompt mixes texts, token ids and lists of them", "prompt")
        return await self._encode([part for part in prompt if isinstance(part, str)], asked)

    async def _encode(self, texts: list[str], asked: _Body) -> list[list[int]]:
        codec = self._model.need_codec("a prompt in text")
        return await codec.encode(texts, asked.add_special_tokens is not False)


class _Logprobs(msgspec.Struct, gc=False):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class _ChunkChoice(msgspec.Struct, gc=False):
    index: int
    text: str
    logprobs: _Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    versions: list[Version]


class _Choice(msgspec.Struct, gc=False):
    index: int
    text: str
    logprobs: _Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: wire.PromptPlaces | None
    prompt_token_ids: list[int] | None
    routed_experts: None
    versions: list[Version]


class _Chunk(msgspec.Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: list[_ChunkChoice]


class _UsageChunk(_Chunk, gc=False, kw_only=True):
    usage: wire.ShortUsage


class _Whole(msgspec.Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: list[msgspec.Raw]
    service_tier: None
    system_fingerprint: None
    usage: wire.TokenUsage
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class CompletionAnswer:
    """Writer of one request's turns; turn k is sample k mod n of prompt k // n."""

    def __init__(
        self, name: str, model: ServedModel, asked: _Body, prompts: list[list[int]]
    ) -> None:
        options = asked.stream_options or wire.StreamOptions()
        self._name = name
        self._model = model
        self._prompts = prompts
        self._samples = asked.samples
        self._logprobs = asked.logprobs is not None
        self._as_ids = asked.return_tokens_as_token_ids
        # Without a tokenizer the text is empty: the ids are the answer.
        self._ids = bool(asked.return_token_ids) or model.codec is None
        self._usage_at_end = options.at_end
        self._usage_always = options.always
        self._offsets: dict[int, int] = {}
        self._choices: list[msgspec.Raw] = []

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        self._choices = await wire.written(streams, self._choice)

    def _choice(self, index: int, stream: TokenStream) -> _Choice:
        end = len(stream.tokens)
        return _Choice(
            index,
            text_between(stream.text, 0, end, True),
            self._logprobs_of(index, stream, 0, end),
            stream.finish_reason,
            stream.stop_reason,
            stream.tokens.tolist() if self._ids else None,
            wire.prompt_places(stream),
            self._prompts[index // self._samples] if self._ids else None,
            None,
            versions_of(stream.versions),
        )

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        usage = wire.TokenUsage(*wire.usage(streams, [len(prompt) for prompt in self._prompts]))
        return wire.encode(
            _Whole(*self._head(streams[0]), self._choices, None, None, usage, None, None, None)
        )

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        del streams
        return b""

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        over = stream.finish_reason is not None and end == len(stream.tokens)
        choice = _ChunkChoice(
            index,
            text_between(stream.text, start, end, over),
            self._logprobs_of(index, stream, start, end),
            stream.finish_reason if over else None,
            stream.stop_reason if over else None,
            self._prompts[index // self._samples] if self._ids and start == 0 else None,
            stream.tokens[start:end].tolist() if self._ids else None,
            versions_of(stream.spans(start, end)),
        )
        if self._usage_always:
            usage = wire.ShortUsage(stream.prompt_tokens, stream.prompt_tokens + end, end)
            return wire.event(wire.encode(_UsageChunk(*self._head(stream), [choice], usage=usage)))
        return wire.event(wire.encode(_Chunk(*self._head(stream), [choice])))

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        if not self._usage_at_end:
            return wire.DONE
        usage = wire.ShortUsage(*wire.usage(streams, [len(prompt) for prompt in self._prompts]))
        return (
            wire.event(wire.encode(_UsageChunk(*self._head(streams[0]), [], usage=usage)))
            + wire.DONE
        )

    def _head(self, stream: TokenStream) -> tuple[str, str, int, str]:
        return self._name, "text_completion", stream.created, self._model.name

    def _logprobs_of(
        self, index: int, stream: TokenStream, start: int, end: int
    ) -> _Logprobs | None:
        if not self._logprobs:
            return None
        found = _Logprobs([], [], [], [])
        offset = self._offsets.get(index, 0)
        logprobs = wire.finite(stream.logprobs[start:end])
        for place, logprob in enumerate(logprobs, start):
            text = token_text(self._model, stream.tokens, place, self._as_ids)
            found.text_offset.append(offset)
            found.token_logprobs.append(logprob)
            found.tokens.append(text)
            found.top_logprobs.append({text: logprob})
            offset += len(text)
        self._offsets[index] = offset
        return found

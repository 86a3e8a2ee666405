"""OpenAI's `POST /v1/completions`, as vLLM 0.32 reads and writes it; fields shared with chat.

Prompts are texts (with a tokenizer) or token ids, one or many. Fields of ROSE: `min_version`,
`exact_version`, `timeout_s`, `resume_from` in; `versions` in every choice out.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import structs

from rose.contract.gateway import versions_of
from rose.contract.replica import Sampling, sampling_of
from rose.gateway.apis import frontend, wire
from rose.gateway.apis.frontend import NOTHING, ApiFrontend, ApiRequest, GenerateFields
from rose.gateway.apis.structured import StructuredBody, structured_of
from rose.gateway.errors import BadRequest
from rose.gateway.text_codec import ServedModel, TextPlan
from rose.gateway.turns.token_stream import TokenStream
from rose.security.callers import ANYBODY, Caller

DEFAULT_MAX_TOKENS = 16
NO_FIELDS: Mapping[str, object] = MappingProxyType({})


class OpenAIUnsupported(GenerateFields, gc=False, kw_only=True):
    """Request fields of both OpenAI routes that no replica can honour; any value but the default is
    refused.
    """

    use_beam_search: bool | None = False
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    echo: bool | None = False
    best_of: int | None = 1
    logits_processors: msgspec.Raw = NOTHING
    thinking_token_budget: int | None = None
    repetition_detection: msgspec.Raw = NOTHING
    watermarking: bool | None = False
    spaces_between_special_tokens: bool | None = True
    stream_interval: int | None = 1
    prompt_embeds: msgspec.Raw = NOTHING
    return_token_offsets: bool | None = False
    routed_experts_prompt_start: int | None = 0
    return_mm_kwargs: bool | None = False
    kv_transfer_params: msgspec.Raw = NOTHING
    ec_transfer_params: msgspec.Raw = NOTHING
    vllm_xargs: msgspec.Raw = NOTHING


class OpenAIBody(OpenAIUnsupported, gc=False, kw_only=True):
    """Request fields of both OpenAI routes; unknown fields are ignored, as OpenAI's own clients
    expect.
    """

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
    stream_options: wire.StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_p: float | None = 0.0
    ignore_eos: bool | None = False
    deterministic: bool | None = False
    prompt_logprobs: int | None = None
    structured_outputs: StructuredBody | None = None
    response_format: msgspec.Raw = NOTHING
    guided_json: msgspec.Raw = NOTHING
    guided_regex: msgspec.Raw = NOTHING
    guided_choice: msgspec.Raw = NOTHING
    guided_grammar: msgspec.Raw = NOTHING

    def check(self, most: int) -> None:
        """Raise BadRequest for fields that replicas cannot honour, or above `most` samples."""
        frontend.refuse_unsupported(self, OpenAIUnsupported)
        frontend.check_prompt_logprobs(self.prompt_logprobs, self.stream)
        if self.routed_experts and self.stream:
            raise BadRequest(
                "routed_experts: a stream of this route has none; leave out stream",
                "routed_experts",
            )
        frontend.check_samples(self.samples, most, self.temperature)
        frontend.stops_of(self.stop)
        if not self.stream and self.stream_options not in (None, wire.StreamOptions()):
            raise BadRequest("stream_options is for streams: send stream", "stream_options")

    @property
    def samples(self) -> int:
        """Number of answers to each prompt: the field `n`, or 1."""
        return 1 if self.n is None else self.n

    def sampling(self, max_tokens: int, most: int) -> Sampling:
        """Return the sampling parameters of each turn, with this token limit and logprobs of the
        `most` most likely tokens. Raises BadRequest for an invalid output constraint.
        """
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        fields = structs.asdict(self)
        fields["max_tokens"] = max_tokens
        fields["logprobs"] = most
        fields["stop_token_ids"] = self.stop_token_ids or None
        fields["structured_outputs"] = structured_of(
            self.structured_outputs, self.response_format, guided
        )
        return sampling_of(fields)

    def text_plan(self, model: ServedModel) -> TextPlan | None:
        """Return the plan by which output becomes text, None without a tokenizer. Raises BadRequest
        for stop strings without one.
        """
        shown = self.include_stop_str_in_output
        special = self.skip_special_tokens
        return frontend.text_plan(
            model, frontend.stops_of(self.stop), shown, special, self.min_tokens
        )


class OpenAIWhole(msgspec.Struct, gc=False, kw_only=True):
    """JSON body of a whole (not streamed) answer, in the order of vLLM's fields; those of the
    prompt are the chat route's alone.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[msgspec.Raw]
    service_tier: None = None
    system_fingerprint: None = None
    usage: wire.TokenUsage
    prompt_logprobs: wire.PromptPlaces | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_text: msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class OpenAIResponse(wire.ApiResponse):
    """Base of the writers of both OpenAI routes; turn k is sample k mod n of prompt k // n."""

    kind = "text_completion"

    def __init__(
        self,
        name: str,
        model: ServedModel,
        asked: OpenAIBody,
        prompts: list[list[int]],
        most: int,
    ) -> None:
        super().__init__(asked.stream_options, sum(map(len, prompts)), most)
        self._name = name
        self._model = model
        self._prompts = prompts
        self._samples = asked.samples
        self._as_ids = asked.return_tokens_as_token_ids
        self._ids = bool(asked.return_token_ids)

    def head(self, stream: TokenStream) -> dict[str, Any]:
        """Return the first fields of answers and events: id, object, creation time, model."""
        return {
            "id": self._name,
            "object": self.kind,
            "created": stream.created,
            "model": self._model.name,
        }

    def counts(self, stream: TokenStream, usage: wire.ShortUsage) -> object:
        return {**self.head(stream), "choices": [], "usage": usage}

    def chunk(
        self, stream: TokenStream, end: int, choice: object, more: Mapping[str, object] = NO_FIELDS
    ) -> bytes:
        """Return the server-sent event of one choice, with the turn's token counts if each event
        has them; `more`: further fields.
        """
        chunk = {**self.head(stream), "choices": [choice], **more}
        if (usage := self.usage_so_far(stream, end)) is not None:
            chunk["usage"] = wire.ShortUsage(*usage)
        return wire.event(wire.encode(chunk))

    def token_text(self, token_ids: Sequence[int], place: int) -> str:
        """Return the text of the token at `place` for a list of logprobs, or `token_id:N` without a
        tokenizer or if asked for, as vLLM writes it.
        """
        if self._as_ids or self._model.codec is None:
            return f"token_id:{token_ids[place]}"
        return self._model.codec.token_text(token_ids, place)


class _CompletionBody(OpenAIBody, gc=False, kw_only=True):
    n: int = 1
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True


_decoder = msgspec.json.Decoder(_CompletionBody)


class CompletionFrontend(ApiFrontend):
    """Frontend of `/v1/completions`: it reads requests; `CompletionAnswer` writes the answers."""

    path = "/v1/completions"

    async def read(
        self, body: bytes, headers: Mapping[str, str], caller: Caller = ANYBODY
    ) -> ApiRequest:
        asked = frontend.read_json(_decoder, body)
        self._model.check_name(asked.model)
        asked.check(self._max_completions)
        most = frontend.most_likely(asked.logprobs, "logprobs")
        if asked.suffix:
            raise BadRequest("suffix is not supported", "suffix")
        prompts = await self._prompts(asked)
        frontend.check_completions(len(prompts) * asked.samples, self._max_completions, "prompt")
        max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        for prompt in prompts:
            self._model.check_length(len(prompt), max_tokens)
        sampling, text = asked.sampling(max_tokens, most), asked.text_plan(self._model)
        name = frontend.request_id_of(headers, asked.request_id)
        turns = frontend.turns_of(
            asked, headers, name, prompts, sampling, samples=asked.samples, text=text
        )
        answer = CompletionAnswer(f"cmpl-{name[0]}", self._model, asked, prompts)
        return frontend.request_of(asked, headers, turns, answer)

    async def _prompts(self, asked: _CompletionBody) -> list[list[int]]:
        prompt = asked.prompt
        if prompt is None or not prompt:
            raise BadRequest("prompt is missing or empty", "prompt")
        if isinstance(prompt, str):
            return await self._encode([prompt], asked)
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) == len(prompt):
            return [ids]
        frontend.check_completions(len(prompt), self._max_completions, "prompt")
        lists = [part for part in prompt if isinstance(part, list)]
        if len(lists) == len(prompt):
            return lists
        if ids or lists:
            raise BadRequest("prompt mixes texts, token ids and lists of them", "prompt")
        return await self._encode([part for part in prompt if isinstance(part, str)], asked)

    async def _encode(self, texts: list[str], asked: _CompletionBody) -> list[list[int]]:
        codec = self._model.need_codec("a prompt in text")
        return await codec.encode(texts, asked.add_special_tokens is not False)


class _CompletionLogprobs(msgspec.Struct, gc=False):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionAnswer(OpenAIResponse):
    """Writer of the answer to a `/v1/completions` request, whole or streamed."""

    def __init__(
        self, name: str, model: ServedModel, asked: _CompletionBody, prompts: list[list[int]]
    ) -> None:
        super().__init__(name, model, asked, prompts, asked.logprobs or 0)
        self._logprobs = asked.logprobs is not None
        # Without a tokenizer the text is empty: the ids are the answer.
        self._ids = self._ids or model.codec is None
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, stream: TokenStream) -> dict[str, Any]:
        fields = self._fields(index, stream, 0, len(stream.tokens))
        prompt, versions = fields.pop("prompt_token_ids"), fields.pop("versions")
        return {
            **fields,
            "prompt_logprobs": wire.prompt_places(stream),
            "prompt_token_ids": prompt,
            "routed_experts": wire.routed_experts(stream),
            "versions": versions,
        }

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        head, usage = self.head(streams[0]), wire.TokenUsage(*self.usage(streams))
        return wire.encode(OpenAIWhole(**head, choices=self._choices, usage=usage))

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        return self.chunk(stream, end, self._fields(index, stream, start, end))

    def _fields(self, index: int, stream: TokenStream, start: int, end: int) -> dict[str, Any]:
        """Return the fields of choice `index` with its tokens [start, end)."""
        over = wire.is_over(stream, end)
        return {
            "index": index,
            "text": wire.text_between(stream, start, end, over),
            "logprobs": self._logprobs_of(index, stream, start, end),
            "finish_reason": stream.finish_reason if over else None,
            "stop_reason": stream.stop_reason if over else None,
            "prompt_token_ids": self._prompt_of(index) if start == 0 else None,
            "token_ids": stream.tokens[start:end].tolist() if self._ids else None,
            "versions": versions_of(stream.spans(start, end)),
        }

    def _prompt_of(self, index: int) -> list[int] | None:
        return self._prompts[index // self._samples] if self._ids else None

    def _logprobs_of(
        self, index: int, stream: TokenStream, start: int, end: int
    ) -> _CompletionLogprobs | None:
        if not self._logprobs:
            return None
        found = _CompletionLogprobs([], [], [], [])
        offset = self._offsets.get(index, 0)
        for place, pairs in enumerate(wire.beside(stream, start, end, self._most), start):
            text, logprob = self.token_text(stream.tokens, place), pairs[0][1]
            found.text_offset.append(offset)
            found.token_logprobs.append(logprob)
            found.tokens.append(text)
            top = {text: logprob}
            for token, other in pairs[1:]:
                # Tokens may share a text; the first is the likeliest, or was sampled.
                top.setdefault(self.token_text([token], 0), other)
            found.top_logprobs.append(top)
            offset += len(text)
        self._offsets[index] = offset
        return found

"""SGLang's native `POST /generate`, as SGLang 0.5.23 reads and writes it.

One prompt, or a list of them (whole answers only), as `input_ids` or, with a tokenizer, `text`.
Fields of ROSE: `min_version`, `exact_version`, `timeout_s`, `resume_from`, `cache_salt` in;
`versions` out. A stream repeats the output so far in each event, as SGLang does by default.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import structs

from rose.contract.gateway import GENERATE, versions_of
from rose.contract.replica import Sampling, StructuredOutputs, sampling_of
from rose.gateway.apis import frontend, wire
from rose.gateway.apis.frontend import NOTHING, ApiFrontend, ApiRequest, GenerateFields
from rose.gateway.apis.structured import checked
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.text_codec import ServedModel, TextPlan
from rose.gateway.turns.token_stream import TokenStream
from rose.security.callers import ANYBODY, Caller

T = TypeVar("T")

DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6


class _SglangUnsupportedSampling(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    n: int | None = 1
    stop_regex: msgspec.Raw = NOTHING
    structural_tag: msgspec.Raw = NOTHING
    logit_bias: msgspec.Raw = NOTHING
    beam_width: int | None = None
    custom_params: msgspec.Raw = NOTHING
    watermark: msgspec.Raw = NOTHING


class _SglangSamplingBody(_SglangUnsupportedSampling, gc=False):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = 0
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = -1
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    sampling_seed: int | None = None
    skip_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    spaces_between_special_tokens: msgspec.Raw = NOTHING
    stream_interval: msgspec.Raw = NOTHING
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool | None = False
    deterministic: bool | None = False

    def sampling(self, most: int) -> Sampling:
        greedy = self.temperature is not None and 0 <= self.temperature < GREEDY_BELOW
        tokens = DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens
        own: dict[str, object] = {
            "temperature": 0.0 if greedy else self.temperature,
            "top_k": max(0, self.top_k or 0),
            "max_tokens": tokens,
            "min_tokens": self.min_new_tokens,
            "stop_token_ids": self.stop_token_ids or None,
            "seed": self.sampling_seed,
            "structured_outputs": self.structured(),
            "logprobs": most,
        }
        return sampling_of({**structs.asdict(self), **own})

    def structured(self) -> StructuredOutputs | None:
        """Return the constraint on the output, None for free text. Raises BadRequest for more than
        one.
        """
        if self.json_schema is None and self.regex is None and self.ebnf is None:
            return None
        found = StructuredOutputs(json=self.json_schema, regex=self.regex, grammar=self.ebnf)
        return checked(found, "sampling_params")

    def text_plan(self, model: ServedModel) -> TextPlan | None:
        """Return the plan by which output becomes text, None without a tokenizer. Raises BadRequest
        for stop strings without one.
        """
        stops, special = frontend.stops_of(self.stop), self.skip_special_tokens
        return frontend.text_plan(model, stops, self.no_stop_trim, special, self.min_new_tokens)


class _SglangUnsupported(GenerateFields, gc=False, kw_only=True):
    input_embeds: msgspec.Raw = NOTHING
    image_data: msgspec.Raw = NOTHING
    video_data: msgspec.Raw = NOTHING
    audio_data: msgspec.Raw = NOTHING
    token_ids_logprob: msgspec.Raw = NOTHING
    return_hidden_states: msgspec.Raw = NOTHING
    return_sampling_mask: msgspec.Raw = NOTHING
    lora_path: msgspec.Raw = NOTHING
    custom_logit_processor: msgspec.Raw = NOTHING


class _SglangBody(_SglangUnsupported, gc=False, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: _SglangSamplingBody | None = None
    return_logprob: bool | None = False
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = 0
    return_routed_experts: bool | None = False
    rid: str | list[str] | None = None


_decoder = msgspec.json.Decoder(_SglangBody)


class SglangFrontend(ApiFrontend):
    """Frontend of SGLang's `/generate`: it reads requests; `SglangAnswer` writes the answers."""

    path = "/generate"

    async def read(
        self, body: bytes, headers: Mapping[str, str], caller: Caller = ANYBODY
    ) -> ApiRequest:
        asked = frontend.read_json(_decoder, body)
        params = asked.sampling_params or _SglangSamplingBody()
        frontend.refuse_unsupported(asked, _SglangUnsupported)
        if asked.routed_experts or asked.return_routed_experts:
            raise BadRequest(
                f"routed_experts: this route gives none; ask on {GENERATE}", "routed_experts"
            )
        frontend.refuse_unsupported(params, _SglangUnsupportedSampling)
        prompts, batch = await self._prompts(asked)
        if batch and asked.stream:
            raise BadRequest("a list of prompts cannot be streamed: send one request for each")
        start_len = asked.logprob_start_len
        if start_len is not None and 0 <= start_len < max(map(len, prompts)):
            raise BadRequest("logprob_start_len: logprobs of the prompt are not given")
        name = _name_of(asked.rid, headers, len(prompts))
        most = frontend.most_likely(asked.top_logprobs_num, "top_logprobs_num")
        most = most if asked.return_logprob else 0
        if most and asked.stream:
            raise BadRequest(
                "top_logprobs_num: each event of a stream would repeat them all; leave out stream",
                "top_logprobs_num",
            )
        sampling, text = params.sampling(most), params.text_plan(self._model)
        for prompt in prompts:
            self._model.check_length(len(prompt), sampling.max_tokens)
        turns = frontend.turns_of(asked, headers, name, prompts, sampling, text=text)
        for turn in turns:
            # SGLang serves the higher priority first, the gateway the lower.
            turn.priority = -turn.priority
        ids = [turn.request_id for turn in turns]
        answer = SglangAnswer(ids, bool(asked.return_logprob), batch, most)
        return frontend.request_of(asked, headers, turns, answer)

    def error(self, error: TurnError) -> bytes:
        return wire.encode({"error": {"message": wire.clean(str(error))}})

    def broken(self, error: TurnError) -> bytes:
        fault = {
            "message": wire.clean(str(error)),
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "code": error.status,
            "retryable": error.retry_after_s > 0,
        }
        return wire.event(wire.encode({"error": fault})) + wire.DONE

    async def _prompts(self, asked: _SglangBody) -> tuple[list[list[int]], bool]:
        """Return the token ids of each prompt, and True if the caller sent a list of prompts.
        Raises BadRequest.
        """
        if asked.text is None and asked.input_ids is None:
            raise BadRequest("the request has no prompt: send input_ids or text")
        # SGLang prefers the tokens if both are given.
        if asked.text is not None and asked.input_ids is None:
            codec = self._model.need_codec("text")
            texts = [asked.text] if isinstance(asked.text, str) else asked.text
            return await codec.encode(self._bounded(texts)), not isinstance(asked.text, str)
        ids = [token for token in asked.input_ids or () if isinstance(token, int)]
        lists = [part for part in asked.input_ids or () if isinstance(part, list)]
        if ids and lists:
            raise BadRequest("input_ids mixes token ids with lists of them")
        return (self._bounded(lists), True) if lists else ([ids], False)

    def _bounded(self, prompts: list[T]) -> list[T]:
        frontend.check_completions(len(prompts), self._max_completions, "prompts")
        return prompts


def _name_of(
    rid: str | list[str] | None, headers: Mapping[str, str], count: int
) -> tuple[str | list[str], bool]:
    """Return the request's id, or one id for each prompt, and True if the caller chose it. Raises
    BadRequest.
    """
    if not isinstance(rid, list):
        return frontend.request_id_of(headers, rid)
    if len(rid) != count or not all(rid):
        raise BadRequest("rid: one for each prompt")
    return rid, True


class SglangAnswer(wire.ApiResponse):
    """Writer of an answer in SGLang's form, whole or streamed."""

    def __init__(self, names: list[str], logprobs: bool, batch: bool, most: int) -> None:
        super().__init__(None, 0, most)
        self._names = names
        self._logprobs = logprobs
        self._batch = batch
        self._body = b""

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        """Encode an answer with logprobs of other tokens; `whole` encodes any other at once."""
        if self._most:
            self._body = await asyncio.to_thread(self._encoded_all, streams)

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the JSON body of the whole answer: one object, or a list of them for a list of
        prompts.
        """
        return self._body or self._encoded_all(streams)

    def _encoded_all(self, streams: Sequence[TokenStream]) -> bytes:
        answers = [self._output(k, stream, len(stream.tokens)) for k, stream in enumerate(streams)]
        return wire.encode(answers if self._batch else answers[0])

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        """Return the server-sent event with the turn's whole output up to token `end`; SGLang
        repeats it in each event.
        """
        del start
        return wire.event(wire.encode(self._output(index, stream, end)))

    def _output(self, index: int, stream: TokenStream, end: int) -> dict[str, object]:
        over = wire.is_over(stream, end)
        spans = stream.spans(0, end)
        tokens = stream.tokens[:end].tolist()
        meta: dict[str, object] = {
            "id": self._names[index],
            "finish_reason": _finish(stream) if over else None,
            "prompt_tokens": stream.prompt_tokens,
            "weight_version": str(spans[-1].version) if spans else "default",
            "num_retractions": max(0, stream.attempts - 1),
        }
        if self._logprobs:
            logprobs = wire.finite(stream.logprobs[:end])
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                (logprob, token, None) for logprob, token in zip(logprobs, tokens, strict=True)
            ]
            meta["output_token_logprobs_length"] = end
            if self._most:
                meta["input_top_logprobs"] = []
                meta["output_top_logprobs"] = [
                    [(logprob, token, None) for token, logprob in place]
                    for place in wire.most_likely(stream, 0, end, self._most)
                ]
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = end
        meta["cached_tokens"] = 0
        if spans:
            meta["weight_versions"] = [
                {"version": str(span.version), "start": span.start, "end": span.end}
                for span in spans
            ]
        if over:
            meta["e2e_latency"] = stream.took_s
        output: dict[str, object] = {}
        if stream.text is not None:
            output["text"] = wire.text_between(stream, 0, end, over)
        output["output_ids"] = tokens
        output["meta_info"] = meta
        output["versions"] = versions_of(spans)
        if over:
            output["segments"] = stream.segments
        return output


def _finish(stream: TokenStream) -> dict[str, object]:
    if stream.finish_reason == "length":
        return {"type": "length", "length": len(stream.tokens)}
    # SGLang names the end-of-sequence token here too: it is the last one.
    matched = stream.stop_reason
    if matched is None and stream.tokens:
        matched = stream.tokens[-1]
    return {"type": "stop", "matched": matched}

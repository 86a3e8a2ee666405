"""SGLang's native `POST /generate`, as SGLang 0.5.23 reads and writes it.

One prompt, or a list of them (whole answers only), as `input_ids` or, with a tokenizer, `text`.
Fields of ROSE: `min_version`, `exact_version`, `timeout_s`, `resume_from`, `cache_salt` in;
`versions` out. A stream repeats the output so far in each event, as SGLang does by default.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from rose.contract.gateway import TurnFields, versions_of
from rose.contract.replica import Sampling, StructuredOutputs
from rose.gateway.apis import wire
from rose.gateway.apis.completions import check_stops, text_between
from rose.gateway.apis.frontend import ApiRequest, check_completions
from rose.gateway.apis.structured import checked
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.request_limits import resume_of, timeout_of
from rose.gateway.text_codec import ServedModel, TextPlan
from rose.gateway.turns.request import NOTHING, TurnRequest, origin_of, refuse_unsupported
from rose.gateway.turns.token_stream import TokenStream

T = TypeVar("T")

DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW = 1e-6
NEUTRAL_SAMPLING: Mapping[str, object] = {
    "n": 1,
    "stop_regex": None,
    "structural_tag": None,
    "logit_bias": None,
    "beam_width": None,
    "custom_params": None,
    "watermark": None,
}
NEUTRAL: Mapping[str, object] = {
    "input_embeds": None,
    "image_data": None,
    "video_data": None,
    "audio_data": None,
    "token_ids_logprob": None,
    "top_logprobs_num": 0,
    "return_hidden_states": False,
    "return_sampling_mask": False,
    "lora_path": None,
    "custom_logit_processor": None,
}


class _SamplingBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
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
    n: int | None = 1
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    stop_regex: msgspec.Raw = NOTHING
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: msgspec.Raw = NOTHING
    ignore_eos: bool | None = False
    logit_bias: msgspec.Raw = NOTHING
    beam_width: int | None = None
    custom_params: msgspec.Raw = NOTHING
    watermark: msgspec.Raw = NOTHING

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> Sampling:
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            0.0 if 0 <= temperature < GREEDY_BELOW else temperature,
            1.0 if self.top_p is None else self.top_p,
            0 if self.top_k is None else max(0, self.top_k),
            DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens,
            self.min_new_tokens or 0,
            self.stop_token_ids or None,
            None,
            self.sampling_seed,
            self.min_p or 0.0,
            1.0 if self.repetition_penalty is None else self.repetition_penalty,
            self.frequency_penalty or 0.0,
            self.presence_penalty or 0.0,
            bool(self.ignore_eos),
            None,
            self.structured(),
        )

    def structured(self) -> StructuredOutputs | None:
        """Return the output's constraint. Raises BadRequest."""
        if self.json_schema is None and self.regex is None and self.ebnf is None:
            return None
        found = StructuredOutputs(json=self.json_schema, regex=self.regex, grammar=self.ebnf)
        return checked(found, "sampling_params")


class _Body(TurnFields, gc=False):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: _SamplingBody | None = None
    return_logprob: bool | None = False
    logprob_start_len: int | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    input_embeds: msgspec.Raw = NOTHING
    image_data: msgspec.Raw = NOTHING
    video_data: msgspec.Raw = NOTHING
    audio_data: msgspec.Raw = NOTHING
    token_ids_logprob: msgspec.Raw = NOTHING
    top_logprobs_num: int | None = 0
    return_hidden_states: msgspec.Raw = NOTHING
    return_sampling_mask: msgspec.Raw = NOTHING
    lora_path: msgspec.Raw = NOTHING
    custom_logit_processor: msgspec.Raw = NOTHING


_decoder = msgspec.json.Decoder(_Body)


class SglangFrontend:
    """Reader of requests; `SglangAnswer` writes."""

    path = "/generate"

    def __init__(self, model: ServedModel, max_completions: int) -> None:
        self._model = model
        self._max_completions = max_completions

    async def read(self, body: bytes, headers: Mapping[str, str]) -> ApiRequest:
        asked = wire.read_json(_decoder, body)
        params = asked.sampling_params or _SamplingBody()
        refuse_unsupported(asked, NEUTRAL)
        refuse_unsupported(params, NEUTRAL_SAMPLING)
        prompts, batch = await self._prompts(asked)
        if batch and asked.stream:
            raise BadRequest("a list of prompts cannot be streamed: send one request for each")
        start_len = asked.logprob_start_len
        if start_len is not None and 0 <= start_len < max(map(len, prompts)):
            raise BadRequest("logprob_start_len: logprobs of the prompt are not given")
        names, named = _names(asked.rid, headers, len(prompts))
        sampling, plan = params.sampling(), self._plan(params)
        for prompt in prompts:
            self._model.check_length(len(prompt), sampling.max_tokens)
        origin = origin_of(headers, asked)
        turns = [
            TurnRequest(
                request_id=name,
                token_ids=prompt,
                sampling=sampling,
                origin=origin,
                min_version=asked.min_version,
                exact_version=asked.exact_version,
                # SGLang serves the higher priority first, the gateway the lower.
                priority=-(asked.priority or 0),
                cache_salt=asked.cache_salt,
                timeout_s=timeout_of(headers, asked.timeout_s),
                named=named,
                text=plan,
                batch=len(prompts) > 1,
            )
            for name, prompt in zip(names, prompts, strict=True)
        ]
        start, event_ids = resume_of(headers, asked.resume_from)
        answer = SglangAnswer(names, bool(asked.return_logprob), batch)
        return ApiRequest(turns, bool(asked.stream), answer, start, event_ids)

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

    def _plan(self, params: _SamplingBody) -> TextPlan | None:
        check_stops(params.stops)
        if params.stops:
            self._model.need_codec("a stop string")
        if self._model.codec is None:
            return None
        return TextPlan(
            self._model.codec,
            params.stops,
            bool(params.no_stop_trim),
            params.skip_special_tokens is not False,
            params.min_new_tokens or 0,
        )

    async def _prompts(self, asked: _Body) -> tuple[list[list[int]], bool]:
        """Return the token ids of each prompt, and True if the caller sent a list of prompts."""
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
        check_completions(len(prompts), self._max_completions, "prompts")
        return prompts


def _names(
    rid: str | list[str] | None, headers: Mapping[str, str], count: int
) -> tuple[list[str], bool]:
    if isinstance(rid, list):
        if len(rid) != count or not all(rid):
            raise BadRequest("rid: one for each prompt")
        return rid, True
    name, named = wire.request_id_of(headers, rid)
    return ([name] if count == 1 else [f"{name}-{k}" for k in range(count)]), named


class SglangAnswer:
    """Writer of one request's turns."""

    def __init__(self, names: list[str], logprobs: bool, batch: bool) -> None:
        self._names = names
        self._logprobs = logprobs
        self._batch = batch

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the body of a 200: an object, or a list of them for a list of prompts."""
        answers = [self._output(k, stream, len(stream.tokens)) for k, stream in enumerate(streams)]
        return wire.encode(answers if self._batch else answers[0])

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        del streams
        return b""

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        """Do nothing: no work is slow."""

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        """Return the event with the output so far."""
        del start
        return wire.event(wire.encode(self._output(index, stream, end)))

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the end mark."""
        del streams
        return wire.DONE

    def _output(self, index: int, stream: TokenStream, end: int) -> dict[str, object]:
        over = stream.finish_reason is not None and end == len(stream.tokens)
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
            output["text"] = text_between(stream.text, 0, end, over)
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

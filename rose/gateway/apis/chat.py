"""OpenAI's `POST /v1/chat/completions`, as vLLM 0.32 reads and writes it; needs a tokenizer.

Fields of ROSE: `min_version`, `exact_version`, `timeout_s`, `resume_from` in; `versions` in every
choice out. Of the rendering options a caller may set the template's variables alone. Outputs that
may call tools are answered when they are whole, streams too.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from rose.contract.gateway import Version, versions_of
from rose.gateway.apis import wire
from rose.gateway.apis.completions import OpenAIBody, check_top_logprobs, text_between, token_text
from rose.gateway.apis.frontend import ApiRequest
from rose.gateway.apis.tools import (
    FOUND,
    FoundTools,
    ToolCall,
    ToolChoice,
    checked_tools,
    found_tools,
)
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.request_limits import resume_of, timeout_of
from rose.gateway.text_codec import ChatOptions, ServedModel
from rose.gateway.turns.request import (
    NOTHING,
    TurnRequest,
    origin_of,
    refuse_unsupported,
    sample_of,
)
from rose.gateway.turns.token_stream import TokenStream
from rose.tokenizer_pool.worker import Variable

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Without a reasoning parser, which the gateway does not have, `include_reasoning` changes nothing.
NEUTRAL: Mapping[str, object] = {
    "add_special_tokens": False,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "return_prompt_text": False,
}
MAX_VARIABLES = 32
MAX_VARIABLE_CHARS = 4_096
# Fields of their own, or tokenizer options that would change the handling of the prompt.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def chat_options(
    variables: Mapping[str, Variable] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: bytes | None = None,
    documents: list[dict[str, str]] | None = None,
    reasoning_effort: str | None = None,
) -> ChatOptions:
    """Return the options. Raises BadRequest for variables that are not the template's."""
    given = dict(variables or {})
    if reasoning_effort is not None:
        given.setdefault("enable_thinking", reasoning_effort != "none")
        given["reasoning_effort"] = reasoning_effort
    if len(given) > MAX_VARIABLES:
        raise _refused(f"at most {MAX_VARIABLES} variables")
    for name, value in given.items():
        if not name.isidentifier() or len(name) > 64:
            raise _refused(f"{name[:64]!r} is no name of a variable")
        if name in RESERVED or name.startswith(("return_", "_")):
            raise _refused(f"{name} is no variable of the template: leave it out")
        if isinstance(value, str) and len(value) > MAX_VARIABLE_CHARS:
            raise _refused(f"{name} has more than {MAX_VARIABLE_CHARS} characters")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise _refused(f"{name} is a number of at most 64 bits")
    return ChatOptions(
        given,
        add_generation_prompt and not continue_final_message,
        continue_final_message,
        tools or b"null",
        documents,
    )


def _refused(why: str) -> BadRequest:
    return BadRequest(f"chat_template_kwargs: {why}", "chat_template_kwargs")


class _Body(OpenAIBody, gc=False, kw_only=True):
    # The process that renders them parses them.
    messages: msgspec.Raw
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = NOTHING
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Variable] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = True
    add_special_tokens: bool | None = False
    media_io_kwargs: msgspec.Raw = NOTHING
    mm_processor_kwargs: msgspec.Raw = NOTHING
    return_prompt_text: bool | None = None


_decoder = msgspec.json.Decoder(_Body)


class ChatFrontend:
    """Reader of requests; `ChatAnswer` writes."""

    path = "/v1/chat/completions"

    def __init__(self, model: ServedModel, max_completions: int) -> None:
        self._model = model
        self._max_completions = max_completions

    async def read(self, body: bytes, headers: Mapping[str, str]) -> ApiRequest:
        asked = wire.read_json(_decoder, body)
        self._model.check_name(asked.model)
        _check(asked, self._max_completions)
        tools = checked_tools(self._model, asked.tools, asked.tool_choice)
        prompt = await self._prompt(asked, tools)
        called = None if asked.tool_choice == "none" else tools
        limit = asked.max_completion_tokens
        max_tokens = asked.max_tokens if limit is None else limit
        self._model.check_length(len(prompt), max_tokens or 0)
        sampling = asked.sampling(self._model.budget(len(prompt), max_tokens))
        name, named = wire.request_id_of(headers, asked.request_id)
        origin = origin_of(headers, asked)
        turns = [
            TurnRequest(
                request_id=name if asked.samples == 1 else f"{name}-{index}",
                token_ids=prompt,
                sampling=sample_of(sampling, index),
                origin=origin,
                min_version=asked.min_version,
                exact_version=asked.exact_version,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                timeout_s=timeout_of(headers, asked.timeout_s),
                named=named,
                text=asked.text_plan(self._model),
                batch=asked.samples > 1,
            )
            for index in range(asked.samples)
        ]
        start, event_ids = resume_of(headers, asked.resume_from)
        answer = ChatAnswer(f"chatcmpl-{name}", self._model, asked, prompt, start, called)
        at_end = called is not None
        return ApiRequest(turns, bool(asked.stream), answer, start, event_ids, at_end)

    def error(self, error: TurnError) -> bytes:
        return wire.vllm_error(error)

    def broken(self, error: TurnError) -> bytes:
        return wire.event(wire.vllm_error(error)) + wire.DONE

    async def _prompt(self, asked: _Body, tools: bytes | None) -> list[int]:
        codec = self._model.need_codec("a conversation")
        options = chat_options(
            asked.chat_template_kwargs,
            asked.add_generation_prompt is not False,
            bool(asked.continue_final_message),
            tools,
            asked.documents,
            asked.reasoning_effort,
        )
        return (await codec.chat(bytes(asked.messages), options))[0]


def _check(asked: _Body, max_completions: int) -> None:
    asked.check(max_completions)
    refuse_unsupported(asked, NEUTRAL)
    if asked.parallel_tool_calls is False:
        raise BadRequest(
            "parallel_tool_calls: how many tools are called, the policy decides; leave it out",
            "parallel_tool_calls",
        )
    if asked.chat_template is not None:
        raise BadRequest("chat_template: only the tokenizer's own is used", "chat_template")
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    check_top_logprobs(asked.top_logprobs, "top_logprobs")


class _TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class _TokenLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_TopLogprob]


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_TokenLogprob]


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning: None = None


class _Choice(msgspec.Struct, gc=False):
    index: int
    message: _Message
    logprobs: _Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None
    versions: list[Version]


class _Whole(msgspec.Struct, gc=False):
    id: str
    object: str
    created: int
    model: str
    choices: list[msgspec.Raw]
    service_tier: None
    system_fingerprint: None
    usage: wire.TokenUsage
    prompt_logprobs: wire.PromptPlaces | None
    prompt_token_ids: list[int] | None
    prompt_text: None
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class ChatAnswer:
    """Writer of one request's turns, one a choice."""

    def __init__(
        self,
        name: str,
        model: ServedModel,
        asked: _Body,
        prompt: list[int],
        resumed: int,
        tools: bytes | None,
    ) -> None:
        """tools: tools that the output may call."""
        options = asked.stream_options or wire.StreamOptions()
        self._name = name
        self._model = model
        self._prompt = prompt
        self._resumed = resumed
        self._logprobs = bool(asked.logprobs)
        self._top = bool(asked.top_logprobs)
        self._as_ids = asked.return_tokens_as_token_ids
        self._ids = bool(asked.return_token_ids)
        self._usage_at_end = options.at_end
        self._usage_always = options.always
        self._stream = bool(asked.stream)
        self._tools = tools
        self._found: list[FoundTools] = []
        self._choices: list[msgspec.Raw] = []

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        """Find tool calls; write choices if they are not streamed."""
        if self._tools is not None:
            for index, stream in enumerate(streams):
                found = await found_tools(self._model, self._tools, self._name, index, stream)
                self._found.append(found)
        if not self._stream:
            self._choices = await wire.written(streams, self._choice)

    def _choice(self, index: int, stream: TokenStream) -> _Choice:
        end = len(stream.tokens)
        return _Choice(
            index,
            self._message(index, stream),
            self._logprobs_of(stream, 0, end),
            self._finish_reason(index, stream),
            stream.stop_reason,
            stream.tokens.tolist() if self._ids else None,
            None,
            versions_of(stream.versions),
        )

    def _message(self, index: int, stream: TokenStream) -> _Message:
        if self._tools is None:
            return _Message("assistant", text_between(stream.text, 0, len(stream.tokens), True))
        found = self._found[index]
        return _Message("assistant", found.content, tool_calls=found.calls or msgspec.UNSET)

    def _finish_reason(self, index: int, stream: TokenStream) -> str | None:
        called = self._tools is not None and self._found[index].calls
        return FOUND if called else stream.finish_reason

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        usage = wire.TokenUsage(*wire.usage(streams, [len(self._prompt)]))
        prompt = self._prompt if self._ids else None
        head = (self._name, "chat.completion", streams[0].created, self._model.name)
        places, none = wire.prompt_places(streams[0]), (None, None, None, None)
        return wire.encode(_Whole(*head, self._choices, None, None, usage, places, prompt, *none))

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        """Return an event with the role for each choice; a returning reader had them."""
        if self._resumed:
            return b""
        events = []
        for index, stream in enumerate(streams):
            choice: dict[str, object] = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = self._chunk(stream, [choice], self._usage(stream, 0))
            chunk["prompt_token_ids"] = self._prompt if self._ids else None
            chunk["prompt_text"] = None
            events.append(wire.event(wire.encode(chunk)))
        return b"".join(events)

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        over = stream.finish_reason is not None and end == len(stream.tokens)
        choice: dict[str, object] = {
            "index": index,
            "delta": self._delta(index, stream, start, end, over),
            "logprobs": self._logprobs_of(stream, start, end),
            "finish_reason": self._finish_reason(index, stream) if over else None,
        }
        if over:
            choice["stop_reason"] = stream.stop_reason
        choice["token_ids"] = stream.tokens[start:end].tolist() if self._ids else None
        choice["versions"] = versions_of(stream.spans(start, end))
        return wire.event(wire.encode(self._chunk(stream, [choice], self._usage(stream, end))))

    def _delta(
        self, index: int, stream: TokenStream, start: int, end: int, over: bool
    ) -> dict[str, object]:
        if self._tools is None:
            return {"content": text_between(stream.text, start, end, over)}
        found = self._found[index]
        if not over:
            # All of it is known, and comes with the last tokens.
            return {"content": ""}
        delta: dict[str, object] = {"content": found.content} if found.content else {}
        return {**delta, "tool_calls": found.deltas()} if found.calls else delta

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        if not self._usage_at_end:
            return wire.DONE
        usage = wire.ShortUsage(*wire.usage(streams, [len(self._prompt)]))
        return wire.event(wire.encode(self._chunk(streams[0], [], usage))) + wire.DONE

    def _chunk(
        self, stream: TokenStream, choices: list[dict[str, object]], usage: object
    ) -> dict[str, object]:
        chunk: dict[str, object] = {
            "id": self._name,
            "object": "chat.completion.chunk",
            "created": stream.created,
            "model": self._model.name,
            "choices": choices,
        }
        if usage is not None:
            chunk["usage"] = usage
        return chunk

    def _usage(self, stream: TokenStream, end: int) -> wire.ShortUsage | None:
        if not self._usage_always:
            return None
        return wire.ShortUsage(stream.prompt_tokens, stream.prompt_tokens + end, end)

    def _logprobs_of(self, stream: TokenStream, start: int, end: int) -> _Logprobs | None:
        if not self._logprobs:
            return None
        content = []
        logprobs = wire.finite(stream.logprobs[start:end])
        for place, logprob in enumerate(logprobs, start):
            text = token_text(self._model, stream.tokens, place, self._as_ids)
            raw = list(text.encode("utf-8", "replace"))
            top = [_TopLogprob(text, logprob, raw)] if self._top else []
            content.append(_TokenLogprob(text, logprob, raw, top))
        return _Logprobs(content)

"""OpenAI's `POST /v1/chat/completions`, as vLLM 0.32 reads and writes it; needs a tokenizer.

Fields of ROSE: `min_version`, `exact_version`, `timeout_s`, `resume_from` in; `versions` in every
choice out. Of the rendering options a caller may set the template's variables alone. Outputs that
may call tools are answered when they are whole, streams too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rose.contract.gateway import versions_of
from rose.gateway.apis import frontend, wire
from rose.gateway.apis.completions import OpenAIBody, OpenAIResponse, OpenAIWhole
from rose.gateway.apis.frontend import NOTHING, ApiFrontend, ApiRequest
from rose.gateway.apis.tools import FOUND, FoundTools, ToolChoice, checked_tools, found_tools
from rose.gateway.errors import BadRequest
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.token_stream import TokenStream
from rose.tokenizer_pool.worker import Chat, Variable

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
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


def chat_job(
    messages: msgspec.Raw,
    variables: Mapping[str, Variable] | None,
    reasoning_effort: str | None = None,
    **options: Any,  # noqa: ANN401 - further fields of `Chat`
) -> Chat:
    """Return the conversation for the tokenizer to render. Raises BadRequest for variables that are
    too many, too large or reserved.

    messages: raw JSON. variables: values for the chat template. options: further fields of `Chat`.
    """
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
    job = Chat(bytes(messages), given, **options)
    job.add_generation_prompt &= not job.continue_final_message
    return job


def _refused(why: str) -> BadRequest:
    return BadRequest(f"chat_template_kwargs: {why}", "chat_template_kwargs")


class _ChatUnsupported(OpenAIBody, gc=False, kw_only=True):
    add_special_tokens: bool | None = False
    media_io_kwargs: msgspec.Raw = NOTHING
    mm_processor_kwargs: msgspec.Raw = NOTHING
    return_prompt_text: bool | None = False


class _ChatBody(_ChatUnsupported, gc=False, kw_only=True):
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
    # Without a reasoning parser, which the gateway does not have, this changes nothing.
    include_reasoning: bool | None = True


_decoder = msgspec.json.Decoder(_ChatBody)


class ChatFrontend(ApiFrontend):
    """Frontend of `/v1/chat/completions`: it reads requests; `ChatAnswer` writes the answers."""

    path = "/v1/chat/completions"

    async def read(self, body: bytes, headers: Mapping[str, str]) -> ApiRequest:
        asked = frontend.read_json(_decoder, body)
        self._model.check_name(asked.model)
        _check(asked, self._max_completions)
        tools = checked_tools(self._model, asked.tools, asked.tool_choice)
        prompt = await self._prompt(asked, tools)
        called = None if asked.tool_choice == "none" else tools
        limit = asked.max_completion_tokens
        max_tokens = asked.max_tokens if limit is None else limit
        self._model.check_length(len(prompt), max_tokens or 0)
        most = frontend.most_likely(asked.top_logprobs, "top_logprobs", counts_sampled=True)
        sampling = asked.sampling(self._model.budget(len(prompt), max_tokens), most)
        name, text = frontend.request_id_of(headers, asked.request_id), asked.text_plan(self._model)
        turns = frontend.turns_of(
            asked, headers, name, [prompt], sampling, samples=asked.samples, text=text
        )
        answer = ChatAnswer(f"chatcmpl-{name[0]}", self._model, asked, prompt, called, most)
        return frontend.request_of(asked, headers, turns, answer, at_end=called is not None)

    async def _prompt(self, asked: _ChatBody, tools: bytes | None) -> list[int]:
        codec = self._model.need_codec("a conversation")
        job = chat_job(
            asked.messages,
            asked.chat_template_kwargs,
            asked.reasoning_effort,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            tools=tools or b"null",
            documents=asked.documents,
        )
        return (await codec.chat(job))[0]


def _check(asked: _ChatBody, max_completions: int) -> None:
    asked.check(max_completions)
    frontend.refuse_unsupported(asked, _ChatUnsupported)
    if asked.parallel_tool_calls is False:
        raise BadRequest(
            "parallel_tool_calls: how many tools are called, the policy decides; leave it out",
            "parallel_tool_calls",
        )
    if asked.chat_template is not None:
        raise BadRequest("chat_template: only the tokenizer's own is used", "chat_template")
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")


class _ChatTopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class _ChatTokenLogprob(_ChatTopLogprob, gc=False):
    top_logprobs: list[_ChatTopLogprob]


class _ChatLogprobs(msgspec.Struct, gc=False):
    content: list[_ChatTokenLogprob]


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[dict[str, object]] | msgspec.UnsetType = msgspec.UNSET
    reasoning: None = None


class ChatAnswer(OpenAIResponse):
    """Writer of the answer to a `/v1/chat/completions` request, whole or streamed; each turn is one
    choice.
    """

    kind = "chat.completion.chunk"

    def __init__(
        self,
        name: str,
        model: ServedModel,
        asked: _ChatBody,
        prompt: list[int],
        tools: bytes | None,
        most: int,
    ) -> None:
        """Keep what the answer repeats of the request. `tools`: JSON of the tools that the output
        may call, None for none.
        """
        super().__init__(name, model, asked, [prompt], most)
        self._prompt = prompt
        self._logprobs = bool(asked.logprobs)
        self._top = bool(asked.top_logprobs)
        self._stream = bool(asked.stream)
        self._tools = tools
        self._found: list[FoundTools] = []

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        """Find the tool calls in all outputs, and encode the choices of an answer that is not
        streamed. Raises TurnError.
        """
        if self._tools is not None:
            for index, stream in enumerate(streams):
                found = await found_tools(self._model, self._tools, self._name, index, stream)
                self._found.append(found)
        if not self._stream:
            await super().prepare(streams)

    def choice(self, index: int, stream: TokenStream) -> dict[str, object]:
        return {
            "index": index,
            "message": self._message(index, stream),
            "logprobs": self._logprobs_of(stream, 0, len(stream.tokens)),
            "finish_reason": self._finish_reason(index, stream),
            "stop_reason": stream.stop_reason,
            "token_ids": stream.tokens.tolist() if self._ids else None,
            "routed_experts": wire.routed_experts(stream),
            "versions": versions_of(stream.versions),
        }

    def _message(self, index: int, stream: TokenStream) -> _Message:
        if self._tools is None:
            text = wire.text_between(stream, 0, len(stream.tokens), True)
            return _Message("assistant", text)
        found = self._found[index]
        return _Message("assistant", found.content, tool_calls=found.calls or msgspec.UNSET)

    def _finish_reason(self, index: int, stream: TokenStream) -> str | None:
        called = self._tools is not None and self._found[index].calls
        return FOUND if called else stream.finish_reason

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        return wire.encode(
            OpenAIWhole(
                **{**self.head(streams[0]), "object": "chat.completion"},
                choices=self._choices,
                usage=wire.TokenUsage(*self.usage(streams)),
                prompt_logprobs=wire.prompt_places(streams[0]),
                prompt_token_ids=self._prompt if self._ids else None,
                prompt_text=None,
            )
        )

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the stream's first events: one for each choice, with the assistant's role and no
        text.
        """
        more = {"prompt_token_ids": self._prompt if self._ids else None, "prompt_text": None}
        return b"".join(
            self.chunk(
                stream,
                0,
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                },
                more,
            )
            for index, stream in enumerate(streams)
        )

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        over = wire.is_over(stream, end)
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
        return self.chunk(stream, end, choice)

    def _delta(
        self, index: int, stream: TokenStream, start: int, end: int, over: bool
    ) -> dict[str, object]:
        if self._tools is None:
            return {"content": wire.text_between(stream, start, end, over)}
        found = self._found[index]
        if not over:
            # The whole delta is known at the end, and is sent with the last tokens.
            return {"content": ""}
        delta: dict[str, object] = {"content": found.content} if found.content else {}
        return {**delta, "tool_calls": found.deltas()} if found.calls else delta

    def _logprobs_of(self, stream: TokenStream, start: int, end: int) -> _ChatLogprobs | None:
        if not self._logprobs:
            return None
        content = []
        for place, pairs in enumerate(wire.beside(stream, start, end, self._most), start):
            text = self.token_text(stream.tokens, place)
            raw = list(text.encode("utf-8", "replace"))
            logprob = pairs[0][1]
            top = [_ChatTopLogprob(text, logprob, raw)] if self._top else []
            for token, other in pairs[1 : self._most]:
                named = self.token_text([token], 0)
                top.append(_ChatTopLogprob(named, other, list(named.encode("utf-8", "replace"))))
            content.append(_ChatTokenLogprob(text, logprob, raw, top))
        return _ChatLogprobs(content)

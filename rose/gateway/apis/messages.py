"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, as translations into chats.

Request fields besides Anthropic's are those of chats, ROSE's included; `versions` out, and in a
session `trajectory`. Outputs that may call tools are streamed when they are whole. Thoughts are
text, since the gateway has no reasoning parser.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rose.contract.gateway import versions_of
from rose.gateway.apis import frontend, wire
from rose.gateway.apis.chat import (
    NO_PLACE,
    ChatAnswer,
    ChatBody,
    ChatForm,
    ChatFrontend,
    ReasoningEffort,
)
from rose.gateway.apis.frontend import NOTHING, ApiRequest
from rose.gateway.apis.tools import FOUND, FoundTools, ToolChoice, chat_tools
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.turns.token_stream import TokenStream
from rose.security.callers import ANYBODY, Caller
from rose.tokenizer_pool.conversation import arguments_of
from rose.tokenizer_pool.forms import MESSAGES

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STOPPED = {"length": "max_tokens", FOUND: "tool_use", "stop": "end_turn"}


class _Thinking(msgspec.Struct, gc=False):
    type: str
    budget_tokens: int | None = None


class _OutputFormat(msgspec.Struct, gc=False):
    type: str
    schema: msgspec.Raw = NOTHING


class _OutputConfig(msgspec.Struct, gc=False):
    effort: ReasoningEffort | None = None
    format: _OutputFormat | None = None


class _AnthropicChoice(ToolChoice, gc=False):
    disable_parallel_tool_use: bool | None = None


class _Edit(msgspec.Struct, gc=False):
    type: str


class _ContextManagement(msgspec.Struct, gc=False):
    edits: list[_Edit] = []


class _MessagesUnsupported(ChatBody, gc=False, kw_only=True):
    container: msgspec.Raw = NOTHING
    inference_geo: str | None = None
    mcp_servers: msgspec.Raw = NOTHING
    speed: str | None = "standard"


class _MessagesBody(_MessagesUnsupported, gc=False, kw_only=True):
    system: msgspec.Raw = NOTHING
    stop_sequences: list[str] | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    context_management: _ContextManagement | None = None
    tool_choice: str | _AnthropicChoice | None = None


_decoder = msgspec.json.Decoder(_MessagesBody)


class MessagesFrontend(ChatFrontend):
    """Frontend of `/v1/messages`: it makes chats of requests; `MessagesAnswer` writes the
    answers.
    """

    path = "/v1/messages"

    async def read(
        self, body: bytes, headers: Mapping[str, str], caller: Caller = ANYBODY
    ) -> ApiRequest:
        asked, form = _chat_of(body)
        return await self._request(asked, headers, caller, MessagesAnswer, form)

    async def count(self, body: bytes) -> bytes:
        """Return the JSON answer to `/v1/messages/count_tokens`. Raises TurnError."""
        asked, form = _chat_of(body)
        done = await self._model.need_codec("a conversation").chat(self._job(asked, form)[0])
        return wire.encode({"input_tokens": len(done.token_ids[0]) // 4})

    def error(self, error: TurnError) -> bytes:
        kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else ERRORS[400])
        fault = {"type": kind, "message": wire.clean(str(error))}
        return wire.encode({"type": "error", "error": fault})

    def broken(self, error: TurnError) -> bytes:
        return b"event: error\n" + wire.event(self.error(error))


def _chat_of(body: bytes) -> tuple[_MessagesBody, ChatForm]:
    """Return the request with the fields of a chat set, and the form of its messages. Raises
    BadRequest for what a chat does not have.
    """
    asked = frontend.read_json(_decoder, body)
    frontend.refuse_unsupported(asked, _MessagesUnsupported)
    frontend.refuse_changed(asked, ChatBody, *NO_PLACE)
    asked.stop = [*frontend.stops_of(asked.stop), *(asked.stop_sequences or ())]
    asked.tools = chat_tools(asked.tools, "custom", "input_schema")
    choice = asked.tool_choice
    if isinstance(choice, _AnthropicChoice):
        asked.tool_choice = choice.type if choice.type in ("auto", "none") else "required"
        if choice.disable_parallel_tool_use:
            asked.parallel_tool_calls = False
    _set_thinking(asked)
    return asked, ChatForm(MESSAGES, bytes(asked.system))


def _set_thinking(asked: _MessagesBody) -> None:
    thinking, config = asked.thinking, asked.output_config
    # No answer has blocks of thinking that could be cleared.
    edits = asked.context_management.edits if asked.context_management else []
    if not all(edit.type.startswith("clear_thinking") for edit in edits):
        raise BadRequest(
            "context_management: the gateway leaves nothing out of a conversation: leave it out",
            "context_management",
        )
    if thinking is not None:
        if thinking.type not in ("adaptive", "disabled"):
            raise BadRequest(
                "thinking: replicas keep no budget of thoughts: its type is adaptive or disabled",
                "thinking",
            )
        shown = {"enable_thinking": thinking.type == "adaptive"}
        asked.chat_template_kwargs = {**shown, **(asked.chat_template_kwargs or {})}
    if config is None:
        return
    asked.reasoning_effort = config.effort or asked.reasoning_effort
    if config.format is not None:
        schema = {"type": config.format.type, "json_schema": {"schema": config.format.schema}}
        asked.response_format = msgspec.Raw(wire.encode(schema))


class MessagesAnswer(ChatAnswer):
    """Writer of the answer to a `/v1/messages` request, whole or streamed: one message."""

    prefix = "msg_"

    def choice(self, index: int, stream: TokenStream) -> dict[str, object]:
        return {
            **self._message_of(stream, [*_blocks(self._output(index, stream))]),
            **self._end(index, stream),
            "usage": self._usage(stream, len(stream.tokens)),
            "versions": versions_of(stream.versions),
            **self._place(index, stream),
        }

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        return bytes(self._choices[0])

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        stream = streams[0]
        message = self._message_of(stream, [])
        message |= {"stop_reason": None, "stop_sequence": None, "usage": self._usage(stream, 0)}
        started = wire.typed_event("message_start", {"message": message})
        if self._tools is not None:
            return started
        return started + _started(0, {"type": "text", "text": ""})

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        over = wire.is_over(stream, end)
        events = []
        if self._tools is None:
            text = wire.text_between(stream, start, end, over)
            events.append(_added(0, {"type": "text_delta", "text": text}))
            if over:
                events.append(_stopped(0))
        elif over:
            for at, block in enumerate(_blocks(self._output(index, stream))):
                events += _whole_block(at, block)
        if over:
            last = {
                "delta": self._end(index, stream),
                "usage": self._usage(stream, end),
                "versions": versions_of(stream.versions),
                **self._place(index, stream),
            }
            events.append(wire.typed_event("message_delta", last))
        return b"".join(events)

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        return wire.typed_event("message_stop", {})

    def _message_of(self, stream: TokenStream, content: list[dict[str, Any]]) -> dict[str, object]:
        kind = {"id": self._name, "type": "message", "role": "assistant"}
        return {**kind, "model": self._model.name, "content": content}

    def _end(self, index: int, stream: TokenStream) -> dict[str, object]:
        stop = stream.stop_reason if isinstance(stream.stop_reason, str) else None
        reason = self._finish_reason(index, stream) or ""
        if reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": STOPPED.get(reason, reason), "stop_sequence": None}

    def _usage(self, stream: TokenStream, tokens: int) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": stream.prompt_tokens, **cached, "output_tokens": tokens}


def _blocks(output: FoundTools) -> Iterator[dict[str, Any]]:
    """Yield the content blocks of an answer: its text, then its calls."""
    if output.content is not None:
        yield {"type": "text", "text": output.content}
    for call in output.calls:
        function: Any = call["function"]
        given = arguments_of(function)
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _whole_block(at: int, block: dict[str, Any]) -> Iterator[bytes]:
    if block["type"] == "text":
        yield _started(at, {**block, "text": ""})
        yield _added(at, {"type": "text_delta", "text": block["text"]})
    else:
        yield _started(at, {**block, "input": {}})
        text = wire.encode(block["input"]).decode()
        yield _added(at, {"type": "input_json_delta", "partial_json": text})
    yield _stopped(at)


def _started(at: int, block: dict[str, Any]) -> bytes:
    return wire.typed_event("content_block_start", {"index": at, "content_block": block})


def _added(at: int, delta: dict[str, Any]) -> bytes:
    return wire.typed_event("content_block_delta", {"index": at, "delta": delta})


def _stopped(at: int) -> bytes:
    return wire.typed_event("content_block_stop", {"index": at})

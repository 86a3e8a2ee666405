"""OpenAI's `POST /v1/responses`, as a translation into chats.

Request fields besides OpenAI's are those of chats, ROSE's included; `versions` out, and in a
session `trajectory`. `previous_response_id` is of an answer that the named session keeps. Outputs
that may call tools are streamed when they are whole.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
    ChatRequest,
    ReasoningEffort,
)
from rose.gateway.apis.frontend import NOTHING, ApiRequest
from rose.gateway.apis.tools import FoundTools, chat_tools
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.token_stream import TokenStream
from rose.security.callers import ANYBODY, Caller
from rose.tokenizer_pool.forms import RESPONSES

# No answer has reasoning items, so nothing of them is left out.
KNOWN_INCLUDES = {"reasoning.encrypted_content"}


class _TextFormat(msgspec.Struct, gc=False):
    type: str = "text"
    name: str = "answer"
    schema: msgspec.Raw = NOTHING


class _Text(msgspec.Struct, gc=False):
    format: _TextFormat | None = None
    verbosity: str | None = None


class _Reasoning(msgspec.Struct, gc=False):
    effort: ReasoningEffort | None = None


class _ResponsesUnsupported(ChatBody, gc=False, kw_only=True):
    background: bool | None = False
    context_management: msgspec.Raw = NOTHING
    conversation: msgspec.Raw = NOTHING
    enable_response_messages: bool | None = False
    max_tool_calls: int | None = None
    moderation: msgspec.Raw = NOTHING
    previous_input_messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    truncation: str | None = "disabled"


class _ResponsesBody(_ResponsesUnsupported, gc=False, kw_only=True):
    messages: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    previous_response_id: str | None = None
    reasoning: _Reasoning | None = None
    store: bool | None = True
    text: _Text | None = None


_decoder = msgspec.json.Decoder(_ResponsesBody)


class ResponsesFrontend(ChatFrontend):
    """Frontend of `/v1/responses`: it makes chats of requests; `ResponsesAnswer` writes the
    answers.
    """

    path = "/v1/responses"

    async def read(
        self, body: bytes, headers: Mapping[str, str], caller: Caller = ANYBODY
    ) -> ApiRequest:
        asked = frontend.read_json(_decoder, body)
        shown_tools = asked.tools
        _make_chat(asked)
        system = wire.encode(asked.instructions)
        form = ChatForm(RESPONSES, system, asked.previous_response_id or "")
        answer_of = partial(ResponsesAnswer, shown_tools=shown_tools)
        return await self._request(asked, headers, caller, answer_of, form)

    def broken(self, error: TurnError) -> bytes:
        code = {"code": error.kind, "message": wire.clean(str(error)), "param": error.param}
        return wire.typed_event("error", code)


def _make_chat(asked: _ResponsesBody) -> None:
    """Set the request's fields of a chat. Raises BadRequest for what a chat does not have."""
    frontend.refuse_unsupported(asked, _ResponsesUnsupported)
    frontend.refuse_changed(asked, ChatBody, *NO_PLACE)
    asked.messages, asked.stream_options = asked.input, None
    if asked.max_output_tokens is not None:
        asked.max_completion_tokens = asked.max_output_tokens
    for name in asked.include or ():
        if name not in KNOWN_INCLUDES:
            raise BadRequest(f"include: answers have no {name[:80]}: leave it out", "include")
    asked.tools = chat_tools(asked.tools, "function", "parameters")
    if asked.reasoning is not None:
        asked.reasoning_effort = asked.reasoning.effort or asked.reasoning_effort
    if asked.text is None:
        return
    if asked.text.verbosity not in (None, "medium"):
        raise BadRequest("text: the policy decides how verbose it is: leave verbosity out", "text")
    form = asked.text.format
    if form is not None and form.type != "text":
        schema = {"name": form.name, "schema": form.schema}
        asked.response_format = msgspec.Raw(wire.encode({"type": form.type, "json_schema": schema}))


class ResponsesAnswer(ChatAnswer):
    """Writer of the answer to a `/v1/responses` request, whole or streamed: one response, whose
    items are a message and calls of functions.
    """

    prefix = "resp_"

    def __init__(
        self, name: str, model: ServedModel, chat: ChatRequest, shown_tools: msgspec.Raw
    ) -> None:
        """Keep what the answer repeats of the request. `shown_tools`: JSON of its tools."""
        super().__init__(name, model, chat)
        assert isinstance(chat.asked, _ResponsesBody)
        asked: _ResponsesBody = chat.asked
        self._numbers = itertools.count()
        self._repeated: dict[str, object] = {
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "temperature": asked.temperature,
            "tool_choice": asked.tool_choice or "auto",
            "tools": [] if bytes(shown_tools) == b"null" else shown_tools,
            "top_p": asked.top_p,
        }

    def choice(self, index: int, stream: TokenStream) -> dict[str, object]:
        return self._finished(index, stream)

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        return bytes(self._choices[0])

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        response = self._response(streams[0], "in_progress", [])
        kinds = "response.created", "response.in_progress"
        started = b"".join(self._event(kind, response=response) for kind in kinds)
        return started if self._tools is not None else started + self._text_begins()

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        over = wire.is_over(stream, end)
        events = []
        if self._tools is None:
            text = wire.text_between(stream, start, end, over)
            events.append(self._text_event("output_text.delta", delta=text, logprobs=[]))
        if over:
            response = self._finished(index, stream)
            events += self._items_end(self._output(index, stream))
            events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        return b""

    def _event(self, kind: str, **fields: object) -> bytes:
        return wire.typed_event(kind, {"sequence_number": next(self._numbers), **fields})

    def _text_event(self, kind: str, **fields: object) -> bytes:
        place = {"item_id": self._item_id(), "output_index": 0, "content_index": 0}
        return self._event(f"response.{kind}", **place, **fields)

    def _text_begins(self) -> bytes:
        item = {**_message(self._item_id(), "in_progress"), "content": []}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._text_event("content_part.added", part=_text_part(""))

    def _items_end(self, output: FoundTools) -> Iterator[bytes]:
        """Yield the last events of a stream's items; of calls, and of text beside them, all."""
        for at, item in enumerate(self._items(output)):
            if item["type"] == "message":
                if self._tools is not None:
                    yield self._text_begins()
                    yield self._text_event("output_text.delta", delta=output.content, logprobs=[])
                yield self._text_event("output_text.done", text=output.content, logprobs=[])
                yield self._text_event("content_part.done", part=item["content"][0])
            else:
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=at, item=begun)
                place = {"item_id": item["id"], "output_index": at}
                kind, text = "response.function_call_arguments", item["arguments"]
                yield self._event(f"{kind}.delta", **place, delta=text)
                yield self._event(f"{kind}.done", **place, name=item["name"], arguments=text)
            yield self._event("response.output_item.done", output_index=at, item=item)

    def _items(self, output: FoundTools) -> Iterator[dict[str, Any]]:
        """Yield the items of an answer: its text, then its calls."""
        if output.content is not None:
            part = _text_part(output.content)
            yield {**_message(self._item_id(), "completed"), "content": [part]}
        for call in output.calls:
            function: Any = call["function"]
            ids = {"id": f"fc_{call['id']}", "call_id": call["id"]}
            yield {"type": "function_call", **ids, **function, "status": "completed"}

    def _item_id(self) -> str:
        return f"msg_{self._name}"

    def _finished(self, index: int, stream: TokenStream) -> dict[str, object]:
        cut = stream.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        response = self._response(stream, status, [*self._items(self._output(index, stream))])
        prompt, total, tokens = self.usage([stream])
        return {
            **response,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": total,
            },
            "versions": versions_of(stream.versions),
            **self._place(index, stream),
        }

    def _response(
        self, stream: TokenStream, status: str, output: list[dict[str, Any]]
    ) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "response",
            "created_at": stream.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model.name,
            "output": output,
            "usage": None,
            **self._repeated,
        }


def _message(name: str, status: str) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "assistant", "status": status}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

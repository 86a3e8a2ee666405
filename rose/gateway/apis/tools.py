"""Tools of a conversation: the offered ones, and the calls in the policy's output.

The template gets the tools as they came. Calls are found by the parser of the served model, in a
process of its own (rose/tokenizer_pool/tool_worker.py), when the output is whole.
"""

import hashlib

import msgspec

from rose.gateway.apis.frontend import NOTHING, read_json
from rose.gateway.errors import BadRequest
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.token_stream import TokenStream
from rose.tokenizer_pool.worker import FoundCall, ParseTools, packed

MAX_TOOLS = 256
FOUND = "tool_calls"


class _Function(msgspec.Struct, gc=False):
    name: str


class _Tool(msgspec.Struct, gc=False):
    function: _Function
    type: str = "function"


class ToolChoice(msgspec.Struct, gc=False):
    """Request field `tool_choice` in OpenAI's form, when it names a function."""

    type: str = "function"


_decode = msgspec.json.Decoder(list[_Tool]).decode


class _OfferedTool(msgspec.Struct, gc=False):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = NOTHING
    parameters: msgspec.Raw = NOTHING


_decode_offered = msgspec.json.Decoder(list[_OfferedTool] | None)


def chat_tools(tools: msgspec.Raw, kind: str | None, schema: str) -> msgspec.Raw:
    """Return JSON of a chat's tools from those of another API, `null` for none. Raises BadRequest
    for tools that its provider runs.

    kind: type of a function there, which may be left out. schema: field with its parameters.
    """
    offered = read_json(_decode_offered, bytes(tools))
    found = []
    for tool in offered or ():
        if tool.type not in (None, kind):
            raise BadRequest(f"tools: {tool.type[:80]} is run by its provider alone", "tools")
        function = {"name": tool.name, "parameters": getattr(tool, schema)}
        described = {} if tool.description is None else {"description": tool.description}
        found.append({"type": "function", "function": function | described})
    return msgspec.Raw(msgspec.json.encode(found or None))


def checked_tools(
    model: ServedModel, tools: msgspec.Raw, choice: str | ToolChoice | None
) -> bytes | None:
    """Return the JSON of the request's tools, None if it has none. Raises BadRequest for tools or a
    `tool_choice` that the gateway does not support.
    """
    data = bytes(tools)
    if data == b"null":
        if choice not in (None, "none", "auto"):
            raise BadRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return None
    try:
        given = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"tools: {error}", "tools") from error
    if not 1 <= len(given) <= MAX_TOOLS:
        raise BadRequest(f"tools: between 1 and {MAX_TOOLS}, not {len(given)}", "tools")
    if any(tool.type != "function" or not tool.function.name for tool in given):
        raise BadRequest("tools: each is of type function, and its function has a name", "tools")
    if choice not in (None, "none", "auto"):
        raise BadRequest(
            'tool_choice is "auto" or "none": which tool is called, the policy decides',
            "tool_choice",
        )
    if choice != "none" and not model.need_codec("a tool").parses_tools:
        raise BadRequest(
            "tools: this gateway finds no calls in outputs: start it with --tool-call-parser NAME, "
            'or send tool_choice "none"',
            "tools",
        )
    return data


class FoundTools(msgspec.Struct, gc=False):
    """Tool calls of one output, and the text beside them, None if there is none."""

    content: str | None
    calls: list[dict[str, object]]

    def deltas(self) -> list[dict[str, object]]:
        """Return the tool calls as a chat stream sends them: each as a dict with its index."""
        return [{"index": index, **call} for index, call in enumerate(self.calls)]


async def found_tools(
    model: ServedModel, tools: bytes, name: str, index: int, stream: TokenStream
) -> FoundTools:
    """Return the tool calls that the model's parser finds in a finished output. Raises TurnError.

    name, index: request id and choice, from which the ids of the calls are made.
    """
    tokens = stream.tokens
    stop = stream.stop_reason
    if stream.finish_reason == "stop" and not isinstance(stop, str):
        # The token that ended the output has no text, as in vLLM.
        tokens = tokens[:-1]
    plan = None if stream.text is None else stream.text.plan
    job = ParseTools(
        packed(tokens),
        tools,
        stop if isinstance(stop, str) else None,
        plan is not None and plan.include_stop,
    )
    text, calls = await model.need_codec("a tool").tool_calls(job)
    found = [_call(name, index, number, call) for number, call in enumerate(calls)]
    return FoundTools(text if text or not found else None, found)


def _call(name: str, index: int, number: int, call: FoundCall) -> dict[str, object]:
    """Return a tool call in OpenAI's form; its id is a hash, equal each time that the turn is
    requested.
    """
    drawn = hashlib.blake2b(f"{name}\n{index}\n{number}".encode(), digest_size=12).hexdigest()
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{drawn}", "type": "function", "function": function}

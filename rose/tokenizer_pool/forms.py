"""Conversations of other APIs in the form of chats: Anthropic's Messages, OpenAI's Responses.

A part that a chat does not have is passed on as it is, and refused by its type with the rest of the
conversation (conversation.py), or refused here.
"""

import json
from collections.abc import Callable
from typing import Any

from rose.tokenizer_pool.conversation import TemplateError

MESSAGES, RESPONSES = "messages", "responses"
Message = dict[str, Any]


def chat_of(form: str, given: object, system: object) -> list[Any]:
    """Return the messages of a chat. Raises TemplateError.

    form: MESSAGES, RESPONSES, or "" for a chat. system: text or parts before them, None for none.
    """
    if isinstance(given, str) and form == RESPONSES:
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise TemplateError("send a list of at least one message")
    first: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    if not form:
        return first + given
    found: list[Message] = []
    translate: Callable[[Message, list[Message]], None] = (
        _add_message if form == MESSAGES else _add_item
    )
    for each in given:
        if not isinstance(each, dict):
            raise TemplateError(f"each of {form} is an object")
        translate(each, found)
    return first + found


def _add_message(message: Message, found: list[Message]) -> None:
    """Add a message of Anthropic's API: results of tools become messages of their own, calls become
    those of a chat.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        found.append({"role": role, "content": content})
        return
    parts: list[Any] = []
    said: Message = {}
    calls = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            if parts:
                found.append({"role": role, "content": parts})
                parts = []
            result = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
            found.append({"role": "tool", **result})
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "thinking" and role == "assistant":
            said["reasoning"] = said.get("reasoning", "") + str(block.get("thinking"))
        else:
            parts.append(block)
    if calls:
        said["tool_calls"] = calls
    if parts or said or not content:
        found.append({"role": role, "content": parts, **said})


def _add_item(item: Message, found: list[Message]) -> None:
    """Add an item of OpenAI's Responses: a call belongs to the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        found.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        if not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": None})
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        found[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
        found.append({"role": "tool", **output})
    else:
        raise TemplateError(f"items of type {kind!r:.40} are not known: leave them out")


def _call(name: object, function: object, arguments: object) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    called = {"name": function, "arguments": text}
    return {"id": name, "type": "function", "function": called}

"""Conversation of a chat request, in the form in which vLLM 0.32 passes it to a chat template.

Content is text, or a list of parts if the template loops over them; an image is a part with the
hash of its file. A message keeps the fields that vLLM knows. Any other content is refused by name:
nothing becomes Python's repr or "None".
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import jinja2.nodes as ast


class TemplateError(ValueError):
    """Error: the chat template does not take the conversation."""


# Types of a part that are text, and the field that holds it.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_OPENAI_FIELDS = frozenset({"type", "text", "refusal", "thinking", "uuid"})
_BILLING_LINE = "x-anthropic-billing-header"


def conversation_of(
    messages: list[Any], *, as_parts: bool, developer: bool
) -> list[dict[str, Any]]:
    """Return the messages in the form that a chat template gets. Raises TemplateError.

    as_parts: the template loops over parts (`takes_parts`). developer: it knows that role; without
    it, developer messages become system messages, merged into one, the first.
    """
    found = [_message(message, as_parts) for message in messages]
    if not developer and any(message["role"] == "developer" for message in found):
        found = _one_system([_as_system(message) for message in found])
    return found


def digest_after(before: bytes, message: object) -> bytes:
    """Return the digest of a conversation up to this message; `before`: the one up to the message
    before it. Raises TemplateError.

    Equal for messages that a template shows alike: text or parts, blanks around an assistant's
    text, marks for caches and ids of calls make no difference.
    """
    found = _message(message, as_parts=True)
    text, images = found["content"], list[str]()
    if found["role"] != "tool":
        images = [part["sha256"] for part in text if "text" not in part]
        text = "\n".join(filter(None, (part.get("text", "\0") for part in text)))
    if found["role"] == "assistant":
        text = text.strip()
    calls = [
        [c["function"].get("name"), c["function"]["arguments"]] for c in found.get("tool_calls", ())
    ]
    more = [found.get(name) for name in ("name", "task", "reasoning", "tools")]
    shown = json.dumps([found["role"], text, calls, more, *images], sort_keys=True)
    return blake2b(before + shown.encode(), digest_size=16).digest()


def _message(message: object, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TemplateError("every message is an object with a role, which is text")
    role, content = message["role"], message.get("content")
    if content is None and role == "user":
        raise TemplateError("content of a user's message is missing: send text")
    if not isinstance(content, str | list | None):
        raise TemplateError(f"content of a message is text or a list of parts, not {content!r:.40}")
    given = [content] if isinstance(content, str) else content or []
    if role == "system":
        given = [part for part in map(_without_billing, given) if part is not None]
    parts = [part for part in map(_part, given) if part is not None]
    result: dict[str, Any] = {"role": role}
    if as_parts and role != "tool":
        result["content"] = parts
    elif any("text" not in part for part in parts):
        where = "a tool's message" if role == "tool" else "the chat template, which takes text"
        raise TemplateError(f"{where} has no place for an image")
    else:
        # vLLM drops an empty text if content is not a list of parts.
        result["content"] = "\n".join(part["text"] for part in parts if as_parts or part["text"])
    return result | _more(role, message)


def _more(role: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a message beside role and content that vLLM keeps."""
    kept = {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            kept["tool_calls"] = _calls(calls)
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise TemplateError("reasoning of a message is text")
            kept |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in message:
        kept["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        kept["tools"] = message.get("tools")
    return kept


def _part(part: object) -> dict[str, Any] | None:
    """Return a content part as {"type": "text", "text": …}, None for a text that is null."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "image" and isinstance(part.get("sha256"), str):
        return {"type": "image", "sha256": part["sha256"]}
    if not isinstance(part, dict) or kind not in _TEXTS or part.get("uuid") is not None:
        raise TemplateError(
            f"content has a part of type {kind!r:.40}: this gateway takes text and images alone"
        )
    text = part.get(_TEXTS[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise TemplateError(f"a part of type {kind} needs {_TEXTS[kind]}, which is text")
    more = {name: value for name, value in part.items() if name not in _OPENAI_FIELDS}
    return {"type": "text", "text": text, **more}


def _without_billing(part: object) -> object:
    """Return a part of a system message without the line that a coding agent puts first.

    None if nothing else is in it.
    """
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str) or not text.startswith(_BILLING_LINE):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return {**part, "text": rest} if isinstance(part, dict) else rest


def _calls(calls: object) -> list[dict[str, Any]]:
    """Return tool calls with arguments as objects; a malformed string becomes an empty object."""
    if not isinstance(calls, list):
        raise TemplateError("tool_calls of a message is a list")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise TemplateError("tool_calls of a message are objects of type function")
        found.append({**call, "function": {**function, "arguments": arguments_of(function)}})
    return found


def arguments_of(function: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call; those that are no JSON object become an empty one."""
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return {}
    return given if isinstance(given, dict) else {}


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with all system messages merged into one, which comes first."""
    places = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if places == [0]:
        return messages
    texts = [_text(messages[place]["content"]) for place in places]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    if any("text" not in part for part in content):
        raise TemplateError("a system's message has no place for an image beside another one")
    return "\n".join(part["text"] for part in content)


def takes_parts(template: ast.Node) -> bool:
    """Return True if a template loops over the parts of a message's content.

    It does with a loop over `content` of a message, over a variable of that name outside macros, or
    over a macro's parameter that is given such content.
    """
    messages = {"messages"}
    while (more := messages | _assigned(template, messages)) != messages:
        messages = more
    items = {
        loop.target.name
        for loop in template.find_all(ast.For)
        if isinstance(loop.target, ast.Name) and _names(loop.iter, messages)
    }
    in_macros: set[int] = set()
    for macro in template.find_all(ast.Macro):
        loops = list(macro.find_all(ast.For))
        in_macros.update(map(id, loops))
        given = set(_parameters_with_content(template, macro, items))
        if any(isinstance(loop.iter, ast.Name) and loop.iter.name in given for loop in loops):
            return True
    return any(
        _is_content(loop.iter, items)
        or (isinstance(loop.iter, ast.Name) and loop.iter.name == "content")
        for loop in template.find_all(ast.For)
        if _is_content(loop.iter, items) or id(loop) not in in_macros
    )


def _assigned(template: ast.Node, names: set[str]) -> set[str]:
    return {
        assign.target.name
        for assign in template.find_all(ast.Assign)
        if isinstance(assign.target, ast.Name) and _names(assign.node, names)
    }


def _parameters_with_content(
    template: ast.Node, macro: ast.Macro, items: set[str]
) -> Iterator[str]:
    for call in template.find_all(ast.Call):
        if isinstance(call.node, ast.Name) and call.node.name == macro.name:
            for parameter, argument in zip(macro.args, call.args, strict=False):
                if _is_content(argument, items):
                    yield parameter.name
            yield from (each.key for each in call.kwargs if _is_content(each.value, items))


def _bare(node: ast.Node | None) -> ast.Node | None:
    """Return the template expression inside filters, tests and slices."""
    while isinstance(node, ast.Filter | ast.Test) or (
        isinstance(node, ast.Getitem) and isinstance(node.arg, ast.Slice)
    ):
        node = node.node
    return node


def _names(node: ast.Node, names: set[str]) -> bool:
    bare = _bare(node)
    return isinstance(bare, ast.Name) and bare.name in names


def _is_content(node: ast.Node, items: set[str]) -> bool:
    bare = _bare(node)
    if isinstance(bare, ast.Getitem):
        key = bare.arg.value if isinstance(bare.arg, ast.Const) else None
    else:
        key = bare.attr if isinstance(bare, ast.Getattr) else None
    return (
        key == "content" and isinstance(bare, ast.Getitem | ast.Getattr) and _is_name(bare, items)
    )


def _is_name(node: ast.Getitem | ast.Getattr, names: set[str]) -> bool:
    return isinstance(node.node, ast.Name) and node.node.name in names

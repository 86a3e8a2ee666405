"""Chat templates, rendered as `transformers` renders them, piece by piece up to a bound.

Importing transformers for it takes seconds, and a worker that was killed must be back soon.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateError(ValueError):
    """A conversation that the template does not take."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's words for training; rendering ignores the mark."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The block's own statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def compile_template(text: str) -> jinja2.Template:
    """A template in the sandbox that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(text)


def render(
    template: jinja2.Template,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    max_chars: int,
) -> str:
    """The prompt of a conversation. Raises TemplateError, or whatever the template raises."""
    final = ""
    if continue_final_message:
        messages = deepcopy(messages)
        final = _mark(messages[-1])
    pieces: list[str] = []
    chars = 0
    for piece in template.generate(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **variables,
    ):
        chars += len(piece)
        if chars > max_chars:
            raise TemplateError(f"the prompt is longer than {max_chars} characters")
        pieces.append(piece)
    text = "".join(pieces)
    return _cut(text, final) if continue_final_message else text


def _mark(message: dict[str, Any]) -> str:
    """Put the tag behind a message's text; the text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + CONTINUE_TAG
        return content
    for block in reversed(content if isinstance(content, list) else []):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            found: str = block["text"]
            block["text"] = found + CONTINUE_TAG
            return found
    raise TemplateError("continue_final_message: the final message has no text to continue")


def _cut(text: str, final: str) -> str:
    """What is in front of the tag; without the blanks that the template took off the message."""
    tag = CONTINUE_TAG.strip()
    at = text.rfind(tag)
    if at < 0 or final.strip() not in text:
        raise TemplateError(
            "continue_final_message: the template leaves out the final message or a part of it"
        )
    return text[:at] if text.startswith(CONTINUE_TAG, at) else text[:at].rstrip()

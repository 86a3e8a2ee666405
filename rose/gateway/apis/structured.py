"""Structured output: the fields of the OpenAI, vLLM and SGLang APIs, in the one form of replicas.

`response_format` is OpenAI's, `structured_outputs` vLLM's, `guided_json`, `guided_regex`,
`guided_choice` and `guided_grammar` those of vLLM before 0.12. A schema stays the received JSON
text: engines parse it.
"""

from collections.abc import Mapping

import msgspec
from msgspec import structs

from rose.contract.replica import StructuredOutputs
from rose.gateway.apis.frontend import NOTHING
from rose.gateway.errors import BadRequest

# Bound on a schema or grammar, since engines compile it.
MAX_CHARS = 64 << 10
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredBody(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """Request field `structured_outputs`, in vLLM's form."""

    json: msgspec.Raw = NOTHING
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = NOTHING
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False


class _Schema(msgspec.Struct, gc=False):
    schema: msgspec.Raw = msgspec.Raw(b"{}")


class FormatBody(msgspec.Struct, gc=False):
    """Request field `response_format`, in OpenAI's form; a structural tag has other parts, which
    engines parse.
    """

    type: str | None = None
    json_schema: _Schema | None = None


def structured_of(
    asked: StructuredBody | None, form: msgspec.Raw, guided: Mapping[str, msgspec.Raw] | None = None
) -> StructuredOutputs | None:
    """Return the constraint on the output, None for free text. Raises BadRequest for two
    constraints or an invalid one.

    form: `response_format`. guided: the older `guided_*` fields, by the part of the name after
    `guided_`.
    """
    wishes = [
        _of_vllm(asked),
        _of_format(form),
        *(_of_guided(kind, raw) for kind, raw in (guided or {}).items()),
    ]
    found = [wish for wish in wishes if wish is not None]
    if len(found) > 1:
        raise BadRequest(
            "send one of response_format and structured_outputs: they exclude each other",
            "response_format",
        )
    return found[0] if found else None


def _of_vllm(
    asked: StructuredBody | None, field: str = "structured_outputs"
) -> StructuredOutputs | None:
    if asked is None:
        return None
    given = structs.asdict(asked)
    del given["disable_fallback"]
    for kind in ("json", "structural_tag"):
        given[kind] = _text(given[kind], kind)
    return checked(StructuredOutputs(**given), field)


def _of_format(form: msgspec.Raw) -> StructuredOutputs | None:
    if bytes(form) == b"null":
        return None
    try:
        asked = msgspec.json.decode(form, type=FormatBody)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"response_format: {error}", "response_format") from error
    match asked.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema" if asked.json_schema is not None:
            schema = _text(asked.json_schema.schema, "json_schema")
            return checked(StructuredOutputs(json=schema), "response_format")
        case "structural_tag":
            tag = bytes(form).decode()
            return checked(StructuredOutputs(structural_tag=tag), "response_format")
    raise BadRequest(
        "response_format: type is text, json_object, json_schema (with its schema) or "
        "structural_tag",
        "response_format",
    )


def _of_guided(kind: str, raw: msgspec.Raw) -> StructuredOutputs | None:
    if bytes(raw) == b"null":
        return None
    field = f"guided_{kind}"
    try:
        asked = msgspec.json.decode(b'{"%b":%b}' % (kind.encode(), bytes(raw)), type=StructuredBody)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"{field}: {error}", field) from error
    return _of_vllm(asked, field)


def checked(found: StructuredOutputs, field: str) -> StructuredOutputs:
    """Return the constraint `found`. Raises BadRequest, which names `field`, unless exactly one
    kind is set and its text is at most MAX_CHARS long.
    """
    given = [kind for kind in KINDS if getattr(found, kind)]
    if len(given) != 1:
        raise BadRequest(f"{field}: send exactly one of {', '.join(KINDS)}", field)
    wish = getattr(found, given[0])
    chars = sum(map(len, wish)) if isinstance(wish, tuple) else len(wish) if wish is not True else 0
    if chars + len(found.whitespace_pattern or "") > MAX_CHARS:
        raise BadRequest(f"{field}: {given[0]} has more than {MAX_CHARS} characters", field)
    return found


def _text(raw: msgspec.Raw, field: str) -> str | None:
    """Return a JSON value as JSON text, None for null; a value that is a string is returned as that
    string. Raises BadRequest.
    """
    if bytes(raw) == b"null":
        return None
    try:
        text = bytes(raw).decode()
        return msgspec.json.decode(raw, type=str) if text.startswith('"') else text
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"{field}: {error}", field) from error

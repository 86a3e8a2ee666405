"""What a caller may say about the rendering of a conversation: the template's variables alone."""

from collections.abc import Mapping

from rose.gateway.errors import BadRequest
from rose.gateway.text import ChatOptions
from rose.texts import Variable

MAX_VARIABLES = 32
MAX_VARIABLE_CHARS = 4_096
# Fields of their own, or options of the tokenizer that would change what is done with the prompt.
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
) -> ChatOptions:
    """Raises BadRequest for variables that are none of the template's."""
    given = variables or {}
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
        given, add_generation_prompt and not continue_final_message, continue_final_message
    )


def _refused(why: str) -> BadRequest:
    return BadRequest(f"chat_template_kwargs: {why}", "chat_template_kwargs")

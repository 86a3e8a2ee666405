"""`POST /tokenize` and `/detokenize`, as vLLM 0.32 has them; they need a tokenizer."""

from typing import Any

import msgspec

from rose.gateway.dialects import wire
from rose.gateway.errors import BadRequest
from rose.gateway.model import ServedModel


class _TokenizeBody(msgspec.Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    # vLLM adds special tokens to a prompt, and leaves them to the template in a conversation.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class _DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


_decode_tokenize = msgspec.json.Decoder(_TokenizeBody)
_decode_detokenize = msgspec.json.Decoder(_DetokenizeBody)


async def tokenize(model: ServedModel, body: bytes) -> bytes:
    """Token ids of a prompt or a conversation. Raises TurnError."""
    asked = wire.read_json(_decode_tokenize, body)
    model.check_name(asked.model)
    codec = model.need_codec("/tokenize")
    if (asked.prompt is None) == (asked.messages is None):
        raise BadRequest("send either prompt or messages")
    if asked.prompt is not None:
        tokens = await codec.encode(asked.prompt, asked.add_special_tokens is not False)
    else:
        options = dict(asked.chat_template_kwargs or {})
        options["continue_final_message"] = asked.continue_final_message
        options["add_generation_prompt"] = (
            asked.add_generation_prompt and not asked.continue_final_message
        )
        tokens = codec.chat(asked.messages or [], options)
    return wire.encode(
        {
            "count": len(tokens),
            "max_model_len": model.max_model_len,
            "tokens": tokens,
            "token_strs": [codec.token(t) for t in tokens] if asked.return_token_strs else None,
        }
    )


async def detokenize(model: ServedModel, body: bytes) -> bytes:
    """Text of token ids. Raises TurnError."""
    asked = wire.read_json(_decode_detokenize, body)
    model.check_name(asked.model)
    codec = model.need_codec("/detokenize")
    if any(not 0 <= token < 1 << 32 for token in asked.tokens):
        raise BadRequest("tokens are ids of at least 0", "tokens")
    return wire.encode({"prompt": codec.decode(asked.tokens)})

"""`POST /tokenize` and `/detokenize`, as vLLM 0.32 has them; they need a tokenizer."""

import msgspec

from rose.gateway.apis import wire
from rose.gateway.apis.chat import chat_job
from rose.gateway.apis.frontend import NOTHING, read_json
from rose.gateway.apis.tools import checked_tools
from rose.gateway.errors import BadRequest
from rose.gateway.text_codec import ServedModel
from rose.tokenizer_pool.worker import Variable, unpacked


class _TokenizeBody(msgspec.Struct):
    prompt: str | None = None
    messages: msgspec.Raw = NOTHING
    model: str | None = None
    # vLLM adds special tokens to a prompt, and leaves them to the template in a conversation.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    tools: msgspec.Raw = NOTHING
    chat_template_kwargs: dict[str, Variable] | None = None


class _DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


_decode_tokenize = msgspec.json.Decoder(_TokenizeBody)
_decode_detokenize = msgspec.json.Decoder(_DetokenizeBody)


async def tokenize(model: ServedModel, body: bytes) -> bytes:
    """Return the JSON answer to `/tokenize`: token ids of a prompt or conversation, their count,
    and their text if asked for. Raises TurnError.
    """
    asked = read_json(_decode_tokenize, body)
    model.check_name(asked.model)
    codec = model.need_codec("/tokenize")
    if (asked.prompt is None) == (bytes(asked.messages) == b"null"):
        raise BadRequest("send either prompt or messages")
    strings = bool(asked.return_token_strs)
    if asked.prompt is not None:
        special = asked.add_special_tokens is not False
        if strings:
            tokens, names = await codec.encode_with_tokens(asked.prompt, special)
        else:
            tokens, names = (await codec.encode([asked.prompt], special))[0], None
    else:
        job = chat_job(
            asked.messages,
            asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            strings=strings,
            tools=checked_tools(model, asked.tools, "none") or b"null",
        )
        done = await codec.chat(job)
        tokens, names = unpacked(done.token_ids[0]), done.strings
    return wire.encode(
        {
            "count": len(tokens),
            "max_model_len": model.max_model_len,
            "tokens": tokens,
            "token_strs": names,
        }
    )


async def detokenize(model: ServedModel, body: bytes) -> bytes:
    """Return the JSON answer to `/detokenize`: the text of token ids. Raises TurnError."""
    asked = read_json(_decode_detokenize, body)
    model.check_name(asked.model)
    codec = model.need_codec("/detokenize")
    if any(not 0 <= token < 1 << 32 for token in asked.tokens):
        raise BadRequest("tokens are ids of at least 0", "tokens")
    return wire.encode({"prompt": await codec.decode_all(asked.tokens)})

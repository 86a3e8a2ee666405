"""Wire forms that several API frontends share: spans, usage, errors in vLLM's shape, events."""

import asyncio
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from rose.contract.gateway import REQUEST_ID_HEADER, GatewayFault, GatewayRefusal
from rose.errors import decoded
from rose.gateway.errors import BadRequest, NoReplica, TurnError
from rose.gateway.request_limits import header_of
from rose.gateway.turns.token_stream import TokenStream

T = TypeVar("T")

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
# Both APIs write -inf and NaN like this.
LOWEST_LOGPROB = -9999.0


class TokenUsage(msgspec.Struct, gc=False):
    """Token counts, in OpenAI's form."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class ShortUsage(msgspec.Struct, gc=False):
    """Token counts without null fields, as vLLM writes them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class StreamOptions(msgspec.Struct, gc=False):
    """Events of a stream that have token counts."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False

    @property
    def at_end(self) -> bool:
        """In an event of its own after the last."""
        return bool(self.include_usage)

    @property
    def always(self) -> bool:
        """In every event."""
        return bool(self.include_usage and self.continuous_usage_stats)


def read_json(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """Return the decoded body. Raises BadRequest with what is wrong in it."""
    try:
        return decoded(decoder, body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"1 validation error: {error}", "body") from error


def request_id_of(headers: Mapping[str, str], given: str | None) -> tuple[str, bool]:
    """Return a request's id, and True if the caller chose it: header, body, else a new one."""
    name = header_of(headers, REQUEST_ID_HEADER) or given
    return (name, True) if name else (uuid.uuid4().hex, False)


def clean(text: str) -> str:
    """Return text that JSON can hold, whatever bytes of a caller or a replica are in it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def vllm_error(error: TurnError) -> bytes:
    """Return the body of an error answer in vLLM's form."""
    fault = GatewayFault(clean(str(error)), error.kind, error.param, error.status)
    return encode(GatewayRefusal(fault))


def error_body(status: int, line: str) -> bytes:
    """Return the body, in vLLM's shape, of an answer to what is not handed to a route."""
    return vllm_error((NoReplica if status == NoReplica.status else BadRequest)(line))


def event(payload: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + payload + b"\n\n"


def finite(logprobs: Sequence[float]) -> Sequence[float]:
    """Return logprobs that JSON can hold."""
    # Nearly all of them are finite, which two passes in C find out.
    if not logprobs or (min(logprobs) >= LOWEST_LOGPROB and not math.isnan(sum(logprobs))):
        return logprobs
    return [LOWEST_LOGPROB if math.isnan(each) else max(each, LOWEST_LOGPROB) for each in logprobs]


# Output tokens of one request that are written in one step of the event loop, some milliseconds;
# the
# rest of a turn counts as TURN_TOKENS.
STEP_TOKENS, TURN_TOKENS = 4_096, 16


async def written(
    streams: Sequence[TokenStream], choice_of: Callable[[int, TokenStream], msgspec.Struct]
) -> list[msgspec.Raw]:
    """Return each turn's choice in JSON, made in steps, between which others run."""
    choices: list[msgspec.Raw] = []
    step_tokens = 0
    for index, stream in enumerate(streams):
        step_tokens += TURN_TOKENS + len(stream.tokens)
        if choices and step_tokens > STEP_TOKENS:
            step_tokens = 0
            await asyncio.sleep(0)
        choices.append(msgspec.Raw(encode(choice_of(index, stream))))
    return choices


class PlaceLogprob(msgspec.Struct, gc=False):
    """One token at a place of a prompt in vLLM's form; without its text, as with ids alone."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptPlaces = list[dict[int, PlaceLogprob] | None]


def prompt_places(stream: TokenStream) -> PromptPlaces | None:
    """Return the logprobs of a turn's prompt in vLLM's form; None if they were not requested."""
    places = stream.prompt_logprobs
    if places is None:
        return None
    return [None if place is None else _place(place) for place in places]


def _place(found: list[tuple[int, float, int | None]]) -> dict[int, PlaceLogprob]:
    return {
        token: PlaceLogprob(max(logprob, LOWEST_LOGPROB), rank) for token, logprob, rank in found
    }


def check_prompt_logprobs(asked: int | None, stream: bool | None) -> None:
    """Raise BadRequest if they would have to be streamed."""
    if asked is not None and stream:
        raise BadRequest(
            "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"
        )


def usage(streams: Sequence[TokenStream], prompts: Sequence[int]) -> tuple[int, int, int]:
    """Return prompt, total and completion tokens; `prompts` has each prompt once."""
    prompt, completion = sum(prompts), sum(len(stream.tokens) for stream in streams)
    return prompt, prompt + completion, completion

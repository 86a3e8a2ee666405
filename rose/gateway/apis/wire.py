"""Writing side of an API frontend: events, token counts, logprobs, and errors in vLLM's shape."""

import asyncio
import math
from collections.abc import Sequence

import msgspec

from rose.contract.gateway import GatewayFault, GatewayRefusal
from rose.gateway.errors import BadRequest, NoReplica, TurnError
from rose.gateway.turns.token_stream import TokenStream

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
# Both APIs write -inf and NaN like this.
LOWEST_LOGPROB = -9999.0
# Output tokens of one request that are written in one step of the event loop, some milliseconds;
# the rest of a turn counts as TURN_TOKENS.
STEP_TOKENS, TURN_TOKENS = 4_096, 16


class ShortUsage(msgspec.Struct, gc=False):
    """Token counts without null fields, as vLLM writes them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class TokenUsage(ShortUsage, gc=False):
    """Token counts, in OpenAI's form."""

    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class StreamOptions(msgspec.Struct, gc=False):
    """Events of a stream that have token counts."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ApiResponse:
    """Writer of one request's turns in the form of one API; the defaults are vLLM's."""

    def __init__(self, options: StreamOptions | None, prompt_tokens: int) -> None:
        """prompt_tokens: of all prompts, each counted once."""
        self._options = options or StreamOptions()
        self._prompt_tokens = prompt_tokens
        self._choices: list[msgspec.Raw] = []

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        """Write each turn's choice, in steps between which others run. Raises TurnError."""
        step_tokens = 0
        for index, stream in enumerate(streams):
            step_tokens += TURN_TOKENS + len(stream.tokens)
            if self._choices and step_tokens > STEP_TOKENS:
                step_tokens = 0
                await asyncio.sleep(0)
            self._choices.append(msgspec.Raw(encode(self.choice(index, stream))))

    def choice(self, index: int, stream: TokenStream) -> object:
        """Return the choice of a turn that is over."""
        raise NotImplementedError

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the body of a 200, all turns being over."""
        raise NotImplementedError

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the start of a stream; may be empty."""
        del streams
        return b""

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        """Return the event with tokens [start, end) of turn `index`; the last one at its end."""
        raise NotImplementedError

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the end of a stream, with the token counts if they were requested."""
        if not self._options.include_usage:
            return DONE
        return event(encode(self.counts(streams[0], ShortUsage(*self.usage(streams))))) + DONE

    def counts(self, stream: TokenStream, usage: ShortUsage) -> object:
        """Return the event of a stream's token counts."""
        raise NotImplementedError

    def usage(self, streams: Sequence[TokenStream]) -> tuple[int, int, int]:
        """Return prompt, total and completion tokens of all turns."""
        completion = sum(len(stream.tokens) for stream in streams)
        return self._prompt_tokens, self._prompt_tokens + completion, completion

    def usage_so_far(self, stream: TokenStream, end: int) -> tuple[int, int, int] | None:
        """Return one turn's counts at its token `end`, if each event is to have them."""
        if not (self._options.include_usage and self._options.continuous_usage_stats):
            return None
        return stream.prompt_tokens, stream.prompt_tokens + end, end


def is_over(stream: TokenStream, end: int) -> bool:
    """Return True if the event up to token `end` is the last one of a whole turn."""
    return stream.finish_reason is not None and end == len(stream.tokens)


def text_between(stream: TokenStream, start: int, end: int, over: bool) -> str:
    """Return the output text that tokens [start, end) settle; empty without a tokenizer."""
    track = stream.text
    return "" if track is None else track.text[track.shown(start, False) : track.shown(end, over)]


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


class PlaceLogprob(msgspec.Struct, gc=False):
    """One token at a place of a prompt in vLLM's form; without its text, as with ids alone."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptPlaces = list[dict[int, PlaceLogprob] | None]


def prompt_places(stream: TokenStream) -> PromptPlaces | None:
    """Return the logprobs of a turn's prompt in vLLM's form; None if they were not requested."""
    if stream.prompt_logprobs is None:
        return None
    return [
        None
        if place is None
        else {token: PlaceLogprob(max(value, LOWEST_LOGPROB), rank) for token, value, rank in place}
        for place in stream.prompt_logprobs
    ]

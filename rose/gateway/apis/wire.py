"""Writing side of an API frontend: events, token counts, logprobs, and errors in vLLM's shape."""

import asyncio
import io
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rose.contract.gateway import GatewayFault, GatewayRefusal
from rose.contract.replica import top_rows
from rose.gateway.errors import BadRequest, NoReplica, TurnError
from rose.gateway.turns.token_stream import TokenStream

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
# Both APIs write -inf and NaN as this number.
LOWEST_LOGPROB = -9999.0
# Output tokens of one request that are written in one step of the event loop, some milliseconds;
# the rest of a turn counts as TURN_TOKENS.
STEP_TOKENS, TURN_TOKENS = 4_096, 16
# A turn with more further data than this is encoded by a thread.
STEP_COLUMN_BYTES = 32 << 10


class ShortUsage(msgspec.Struct, gc=False):
    """Token counts of an answer, without null fields, as vLLM writes them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class TokenUsage(ShortUsage, gc=False):
    """Token counts of an answer, with the null fields of OpenAI's form."""

    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class StreamOptions(msgspec.Struct, gc=False):
    """Request field `stream_options`: which events of a stream carry token counts."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ApiResponse:
    """Writer of one request's answer, whole or streamed, in the form of one API; the defaults are
    vLLM's.
    """

    def __init__(self, options: StreamOptions | None, prompt_tokens: int, most: int = 0) -> None:
        """Keep the stream options, and the number of prompt tokens, each prompt counted once.

        most: number of most likely tokens that the answer has at each token, in JSON.
        """
        self._options = options or StreamOptions()
        self._most = most
        self._prompt_tokens = prompt_tokens
        self._choices: list[msgspec.Raw] = []

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        """Encode the choice of each finished turn for `whole`, letting other tasks run in between.
        Raises TurnError.
        """
        step_tokens = 0
        for index, stream in enumerate(streams):
            if stream.column_bytes > STEP_COLUMN_BYTES:
                self._choices.append(await asyncio.to_thread(self._encoded, index, stream))
                continue
            step_tokens += TURN_TOKENS + len(stream.tokens) * (1 + self._most)
            if self._choices and step_tokens > STEP_TOKENS:
                step_tokens = 0
                await asyncio.sleep(0)
            self._choices.append(self._encoded(index, stream))

    def _encoded(self, index: int, stream: TokenStream) -> msgspec.Raw:
        return msgspec.Raw(encode(self.choice(index, stream)))

    def choice(self, index: int, stream: TokenStream) -> object:
        """Return the choice of a finished turn, as an object to be encoded in the answer's JSON."""
        raise NotImplementedError

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the JSON body of the whole answer, after `prepare`; all turns are over."""
        raise NotImplementedError

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the first bytes of a stream, sent before any token; may be empty."""
        del streams
        return b""

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        """Return the server-sent event with tokens [start, end) of turn `index`; the event at the
        turn's end has its finish reason.
        """
        raise NotImplementedError

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the last bytes of a stream: token counts if they were requested, then `[DONE]`."""
        if not self._options.include_usage:
            return DONE
        return event(encode(self.counts(streams[0], ShortUsage(*self.usage(streams))))) + DONE

    def counts(self, stream: TokenStream, usage: ShortUsage) -> object:
        """Return the object of the stream's event that has these token counts."""
        raise NotImplementedError

    def usage(self, streams: Sequence[TokenStream]) -> tuple[int, int, int]:
        """Return the numbers of (prompt, total, completion) tokens of all turns."""
        completion = sum(len(stream.tokens) for stream in streams)
        # A prompt with images is the request's only one.
        first = streams[0]
        prompt = self._prompt_tokens if first.expanded is None else first.prompt_tokens
        return prompt, prompt + completion, completion

    def usage_so_far(self, stream: TokenStream, end: int) -> tuple[int, int, int] | None:
        """Return (prompt, total, completion) tokens of one turn up to its token `end`; None unless
        each event is to have them.
        """
        if not (self._options.include_usage and self._options.continuous_usage_stats):
            return None
        return stream.prompt_tokens, stream.prompt_tokens + end, end


def is_over(stream: TokenStream, end: int) -> bool:
    """Return True if the event that ends with token `end` is the last one of a whole turn."""
    return stream.finish_reason is not None and end == len(stream.tokens)


def text_between(stream: TokenStream, start: int, end: int, over: bool) -> str:
    """Return the text that becomes final with tokens [start, end) of the output; "" without a
    tokenizer. `over`: True in the turn's last event.
    """
    track = stream.text
    return "" if track is None else track.text[track.shown(start, False) : track.shown(end, over)]


def clean(text: str) -> str:
    """Return the text with lone surrogates replaced, so that it can be encoded as UTF-8 JSON."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def vllm_error(error: TurnError) -> bytes:
    """Return the JSON body of an error response, in vLLM's form: message, type, parameter and
    status.
    """
    fault = GatewayFault(clean(str(error)), error.kind, error.param, error.status)
    return encode(GatewayRefusal(fault))


def error_body(status: int, line: str) -> bytes:
    """Return the JSON body, in vLLM's form, for an HTTP request that is refused with `status`
    before it reaches a route.
    """
    return vllm_error((NoReplica if status == NoReplica.status else BadRequest)(line))


def event(payload: bytes) -> bytes:
    """Return the payload framed as one server-sent event: `data: ...` and an empty line."""
    return b"data: " + payload + b"\n\n"


def typed_event(kind: str, fields: Mapping[str, object]) -> bytes:
    """Return one server-sent event of this type, which its JSON has too, as `type`."""
    return b"event: " + kind.encode() + b"\n" + event(encode({"type": kind, **fields}))


def beside(
    stream: TokenStream, start: int, end: int, most: int
) -> Iterator[list[tuple[int, float]]]:
    """Yield (token id, logprob) for each of the tokens [start, end): its own first, then those of
    the others among the `most` most likely ones.
    """
    owns = zip(stream.tokens[start:end], finite(stream.logprobs[start:end]), strict=True)
    if not most:
        yield from ([own] for own in owns)
        return
    for own, likely in zip(owns, most_likely(stream, start, end, most), strict=True):
        yield [own, *[pair for pair in likely if pair[0] != own[0]]]


def most_likely(
    stream: TokenStream, start: int, end: int, most: int
) -> Iterator[list[tuple[int, float]]]:
    """Yield (token id, logprob) of the `most` most likely tokens at each of the tokens
    [start, end).
    """
    for row in top_rows(most).iter_unpack(stream.top_logprobs(start, end, most)):
        yield [*zip(row[:most], finite(row[most:]), strict=True)]


def routed_experts(stream: TokenStream) -> bytes | None:
    """Return the turn's experts as a file of numpy (`.npy`), which vLLM's answers have in base64;
    None if they were not asked for.
    """
    found = stream.routed_experts()
    if found is None:
        return None
    import numpy as np

    file = io.BytesIO()
    np.save(file, found, allow_pickle=False)
    return file.getvalue()


def finite(logprobs: Sequence[float]) -> Sequence[float]:
    """Return logprobs for JSON: NaN and values below LOWEST_LOGPROB become LOWEST_LOGPROB."""
    # Nearly all logprobs are finite, which two passes in C check.
    if not logprobs or (min(logprobs) >= LOWEST_LOGPROB and not math.isnan(sum(logprobs))):
        return logprobs
    return [LOWEST_LOGPROB if math.isnan(each) else max(each, LOWEST_LOGPROB) for each in logprobs]


class PlaceLogprob(msgspec.Struct, gc=False):
    """Logprob of one token at a position of the prompt, in vLLM's form; its text is left out."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptPlaces = list[dict[int, PlaceLogprob] | None]


def prompt_places(stream: TokenStream) -> PromptPlaces | None:
    """Return the prompt's logprobs in vLLM's form: for each position a dict by token id, or None;
    None if they were not requested.
    """
    if stream.prompt_logprobs is None:
        return None
    return [
        None
        if place is None
        else {token: PlaceLogprob(max(value, LOWEST_LOGPROB), rank) for token, value, rank in place}
        for place in stream.prompt_logprobs
    ]

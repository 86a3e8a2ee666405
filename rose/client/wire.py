"""Wire form of the client: requests to a gateway, its answers and its event streams.

Answers in `text/event-stream` are as vLLM writes them: `data: {…}`, at last `[DONE]`. The contract
stands in docs/architecture.md, "gateway HTTP".
"""

from collections.abc import AsyncIterator, Iterable

import aiohttp
import msgspec

from rose.client.errors import AnswerBroken, RequestRefused, RolloutError, VersionNotServed
from rose.client.types import Turn, TurnRequest
from rose.decoding import decoded

GENERATE = "/inference/v1/generate"
FINISH_SESSION = "/finish_session"
RETRIED = frozenset({429, 502, 503, 504})


class TokenLogprob(msgspec.Struct, gc=False):
    """Logprob of one output token; the token's name beside it is not needed."""

    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """One entry a token."""

    content: list[TokenLogprob]


class Version(msgspec.Struct, gc=False):
    """Output tokens [start, end) of one policy version, on KV that may be older."""

    version: int
    start: int
    end: int
    oldest_version: int | None = None


class AnswerSegment(msgspec.Struct, gc=False):
    """Output tokens [start, end) from one replica."""

    replica: str
    kind: str
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    token_ids: tuple[int, ...]
    logprobs: Logprobs
    finish_reason: str


class _Answer(msgspec.Struct, gc=False):
    request_id: str
    choices: list[_Choice]
    versions: list[Version]
    segments: list[AnswerSegment]
    attempts: int


class StreamChoice(msgspec.Struct, gc=False):
    """New tokens of a stream, or how it ends."""

    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class StreamError(msgspec.Struct, gc=False):
    """Why a stream ends early; `code` is the HTTP status it would have had."""

    message: str = "no reason given"
    code: int = 503


class StreamEvent(msgspec.Struct, gc=False):
    """One `data:` of a stream. Spans count from the first token of this answer."""

    choices: list[StreamChoice] = []
    versions: list[Version] | None = None
    segments: list[AnswerSegment] | None = None
    attempts: int | None = None
    error: StreamError | None = None


encode = msgspec.json.Encoder().encode
_ANSWER = msgspec.json.Decoder(_Answer)
_EVENT = msgspec.json.Decoder(StreamEvent)
_ANY = msgspec.json.Decoder()


def encode_ask(ask: TurnRequest, *, stream: bool = False) -> bytes:
    """Body of a generate request."""
    body: dict[str, object] = {
        "request_id": ask.request_id,
        "token_ids": ask.token_ids,
        # In vLLM's words: the sampled token's logprob and no other's.
        "sampling_params": {**msgspec.to_builtins(ask.sampling), "logprobs": 0},
        "min_version": ask.min_version,
        "exact_version": ask.exact_version,
        "priority": ask.priority,
    }
    origin = {
        "group_id": ask.group_id,
        "group_size": ask.group_size,
        "hedges": ask.hedges,
        "job": ask.job,
    }
    body |= {name: value for name, value in origin.items() if value}
    return encode({**body, "stream": True} if stream else body)


def headers(ask: TurnRequest) -> dict[str, str]:
    """Headers of a generate request."""
    return {"Content-Type": "application/json", "X-Session-ID": ask.session_id}


def decode_turn(body: bytes) -> Turn:
    """A whole answer. Raises AnswerBroken for anything else."""
    try:
        answer = decoded(_ANSWER, body)
        choice = answer.choices[0]
    except (msgspec.MsgspecError, IndexError) as error:
        raise AnswerBroken(f"the gateway's answer is not a turn: {error}") from error
    if len(choice.token_ids) != len(choice.logprobs.content):
        raise AnswerBroken("the gateway's answer has not one logprob for each token")
    return Turn(
        request_id=answer.request_id,
        token_ids=choice.token_ids,
        logprobs=tuple([token.logprob for token in choice.logprobs.content]),
        versions=joined((span.version, span.start, span.end) for span in answer.versions),
        oldest_versions=joined(
            (span.oldest_version, span.start, span.end)
            for span in answer.versions
            if span.oldest_version is not None
        ),
        segments=tuple([(s.replica, s.kind, s.start, s.end) for s in answer.segments]),
        finish_reason=choice.finish_reason,
        attempts=answer.attempts,
    )


def joined(spans: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """(version, start, end) with neighbours of one version made one."""
    out: list[tuple[int, int, int]] = []
    for version, start, end in spans:
        if out and (out[-1][0], out[-1][2]) == (version, start):
            start = out.pop()[1]
        out.append((version, start, end))
    return tuple(out)


def decode_event(data: bytes) -> StreamEvent:
    """One event of a stream. Raises AnswerBroken for anything else."""
    try:
        return decoded(_EVENT, data)
    except msgspec.MsgspecError as error:
        raise AnswerBroken(f"the gateway's stream is not a turn: {error}") from error


def message(status: int, body: bytes) -> str:
    """What an error's body says."""
    try:
        return str(decoded(_ANY, body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"HTTP {status}"


def refusal(status: int, text: str) -> RolloutError:
    """The error for a status that no retry changes."""
    if status == 409:
        return VersionNotServed(text)
    return RequestRefused(f"HTTP {status}: {text}")


# An event holds one step's tokens; anything near this is not one.
MAX_EVENT_BYTES = 1 << 20
DONE = b"[DONE]"


async def events(content: aiohttp.StreamReader) -> AsyncIterator[StreamEvent]:
    """Until `[DONE]` or the end of the stream. Raises AnswerBroken for what is no such stream."""
    rest = b""
    while data := await content.readany():
        lines = (rest + data if rest else data).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == DONE:
                return
            yield decode_event(payload)
        if len(rest) > MAX_EVENT_BYTES:
            raise AnswerBroken(f"an event above {MAX_EVENT_BYTES} bytes")

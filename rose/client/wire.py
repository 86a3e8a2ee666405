"""Wire form of the client: requests to a gateway, its answers and its event streams.

Answers in `text/event-stream` have vLLM's form: `data: {…}`, at last `[DONE]`. The contract is in
docs/architecture.md, "gateway HTTP".
"""

from collections.abc import AsyncIterator, Iterable

import aiohttp
import msgspec

from rose.client.errors import AnswerBroken, RequestRefused, RolloutError, VersionNotServed
from rose.client.types import ClientTurn, Turn
from rose.contract.gateway import (
    MAX_EVENT_BYTES,
    SESSION_HEADER,
    GatewayRefusal,
    SessionTokens,
    SessionTrajectory,
    StreamEvent,
    TopLogprobs,
    TurnAnswer,
    Versions,
)
from rose.contract.replica import top_row_bytes
from rose.errors import decoded
from rose.tracing import trace_of

encode = msgspec.json.Encoder().encode
_ANSWER = msgspec.json.Decoder(TurnAnswer)
_EVENT = msgspec.json.Decoder(StreamEvent)
_VERSIONS = msgspec.json.Decoder(Versions)
_SESSION = msgspec.json.Decoder(SessionTokens)
_REFUSAL = msgspec.json.Decoder(GatewayRefusal)


def headers(ask: ClientTurn) -> dict[str, str]:
    """Return the HTTP headers of a generate request: content type, session id, trace context."""
    said = {"Content-Type": "application/json", SESSION_HEADER: ask.session_id}
    return said | ask.trace.headers() if ask.trace is not None else said


def traced(response: aiohttp.ClientResponse) -> str:
    """Return the trace id in a response's headers, "" if there is none."""
    trace = trace_of(response.headers)
    return trace.trace_id if trace is not None else ""


def decode_turn(body: bytes, trace_id: str = "") -> Turn:
    """Return the turn in the body of a whole answer. Raises AnswerBroken for any other body."""
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
        trace_id=trace_id,
        top_logprobs=checked_top(choice.top_logprobs, len(choice.token_ids)),
        npy=choice.routed_experts,
        prompt_token_ids=answer.prompt_token_ids,
    )


def checked_top(top: TopLogprobs | None, tokens: int) -> TopLogprobs | None:
    """Return the most likely tokens of an answer. Raises AnswerBroken unless they are of that many
    tokens.
    """
    if top is not None and len(top.data) != tokens * top_row_bytes(top.most):
        raise AnswerBroken(f"{tokens} tokens came without {top.most} logprobs each")
    return top


def joined(spans: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the (version, start, end) spans as a tuple, adjacent spans of one version merged."""
    out: list[tuple[int, int, int]] = []
    for version, start, end in spans:
        if out and (out[-1][0], out[-1][2]) == (version, start):
            start = out.pop()[1]
        out.append((version, start, end))
    return tuple(out)


def decode_event(data: bytes) -> StreamEvent:
    """Return the StreamEvent in the data of one event. Raises AnswerBroken for any other text."""
    try:
        return decoded(_EVENT, data)
    except msgspec.MsgspecError as error:
        raise AnswerBroken(f"the gateway's stream is not a turn: {error}") from error


def decode_versions(status: int, body: bytes) -> Versions:
    """Return the versions in an answer; for a job that is not registered, an empty Versions.

    Raises the error that any other status means, and AnswerBroken for an invalid body.
    """
    try:
        if status == 200:
            return decoded(_VERSIONS, body)
        if status == 404 and decoded(_REFUSAL, body).error.param == "job":
            return Versions()
    except msgspec.MsgspecError as error:
        raise AnswerBroken(f"the gateway's answer says no versions: {error}") from error
    raise refusal(status, message(status, body))


def decode_trajectories(status: int, body: bytes) -> tuple[SessionTrajectory, ...]:
    """Return the trajectories in an answer, none for a session that the gateway does not keep.

    Raises the error that any other status means, and AnswerBroken for an invalid body.
    """
    try:
        if status == 200:
            return decoded(_SESSION, body).trajectories
        if status == 404 and decoded(_REFUSAL, body).error.param is None:
            return ()
    except msgspec.MsgspecError as error:
        raise AnswerBroken(f"the gateway's answer is not a session: {error}") from error
    raise refusal(status, message(status, body))


def message(status: int, body: bytes) -> str:
    """Return the error message in the body of a refusal; "HTTP <status>" if the body has none."""
    try:
        return decoded(_REFUSAL, body).error.message
    except msgspec.MsgspecError:
        return f"HTTP {status}"


def refusal(status: int, text: str) -> RolloutError:
    """Return the error for a status that no retry changes, with `text` as its message.

    VersionNotServed for 409, RequestRefused for any other.
    """
    if status == 409:
        return VersionNotServed(text)
    return RequestRefused(f"HTTP {status}: {text}")


DONE = b"[DONE]"


async def events(content: aiohttp.StreamReader) -> AsyncIterator[StreamEvent]:
    """Yield the events of a streamed answer until `[DONE]` or the end of the body.

    Raises AnswerBroken for an invalid event, or one longer than MAX_EVENT_BYTES.
    """
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

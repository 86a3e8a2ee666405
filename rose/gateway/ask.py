"""What a request of any API comes down to: turns, and how their tokens are written back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.feed import TurnFeed
from rose.gateway.turn_request import TurnRequest

TIMEOUT_HEADER = "X-Request-Timeout"
REQUEST_ID_HEADER = "X-Request-Id"
EVENT_ID_HEADER = "Last-Event-ID"


class Answer(Protocol):
    """Writes the turns of one request in the words of one API."""

    def whole(self, feeds: Sequence[TurnFeed]) -> bytes:
        """Body of a 200, all turns being over."""
        ...

    def begin(self, feeds: Sequence[TurnFeed]) -> bytes:
        """What a stream starts with; may be empty."""
        ...

    def part(self, index: int, feed: TurnFeed, start: int, end: int) -> bytes:
        """Event with tokens [start, end) of turn `index`; the last one when the turn is over."""
        ...

    def close(self, feeds: Sequence[TurnFeed]) -> bytes:
        """What a stream ends with."""
        ...


@dataclass(slots=True)
class Ask:
    """One request. `resume_from`: tokens that a reconnecting reader has; `event_ids`: it counts."""

    turns: list[TurnRequest]
    stream: bool
    answer: Answer
    resume_from: int = 0
    event_ids: bool = False


class Dialect(Protocol):
    """One API: reads requests, writes answers, complains in its own shape."""

    path: str

    async def read(self, body: bytes, headers: Mapping[str, str]) -> Ask:
        """The request. Raises TurnError for what the API would refuse."""
        ...

    def error(self, error: TurnError) -> bytes:
        """Body of an error answer."""
        ...

    def broken(self, error: TurnError) -> bytes:
        """Event for an error after the stream has begun, with what ends the stream."""
        ...


def timeout_of(headers: Mapping[str, str], body_s: float | None) -> float | None:
    """Seconds that the caller allows: the body's field, else the header. Raises BadRequest."""
    text = headers.get(TIMEOUT_HEADER)
    if body_s is not None or text is None:
        return body_s
    try:
        return float(text)
    except ValueError as error:
        raise BadRequest(f"{TIMEOUT_HEADER} is a number of seconds, not {text!r}") from error


def resume_of(headers: Mapping[str, str], body_from: int | None) -> tuple[int, bool]:
    """Tokens that the caller has already, and whether it wants event ids. Raises BadRequest."""
    text = headers.get(EVENT_ID_HEADER)
    if text is not None and not text.isdigit():
        raise BadRequest(f"{EVENT_ID_HEADER} is a number of tokens, not {text!r}")
    start = body_from if body_from is not None else int(text or 0)
    if start < 0:
        raise BadRequest("resume_from is a number of tokens, at least 0", "resume_from")
    return start, text is not None

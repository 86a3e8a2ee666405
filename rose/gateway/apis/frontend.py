"""Interface of an API frontend: reads requests into turns, and writes their tokens back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.turns.request import TurnRequest
from rose.gateway.turns.token_stream import TokenStream

# Engines sample greedily at temperatures below it.
GREEDY_BELOW = 1e-5


class ApiResponse(Protocol):
    """Writer of one request's turns in the form of one API."""

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        """Do the slow work of a whole answer, in steps or elsewhere. Raises TurnError."""
        ...

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the body of a 200, all turns being over."""
        ...

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the start of a stream; may be empty."""
        ...

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        """Return the event with tokens [start, end) of turn `index`; the last one at its end."""
        ...

    def close(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the end of a stream."""
        ...


@dataclass(slots=True)
class ApiRequest:
    """One request. resume_from: tokens that a reconnecting reader has. event_ids: it counts them.

    at_end: nothing can be sent before the turns are over, and a stream begins then.
    """

    turns: list[TurnRequest]
    stream: bool
    answer: ApiResponse
    resume_from: int = 0
    event_ids: bool = False
    at_end: bool = False


def check_completions(count: int, most: int, field: str) -> None:
    """Raise BadRequest for a request of no completions, or of more than `most`."""
    if count < 1:
        raise BadRequest(f"{field}: at least 1 completion, got {count}", field)
    if count > most:
        raise BadRequest(
            f"{field}: {count} completions in one request, this gateway takes {most}: send several "
            "requests, or start it with a higher --max-completions",
            field,
        )


def check_samples(samples: int, most: int, temperature: float | None) -> None:
    """Raise BadRequest for a number of samples to a prompt that vLLM refuses."""
    check_completions(samples, most, "n")
    if samples > 1 and temperature is not None and temperature < GREEDY_BELOW:
        raise BadRequest(f"n must be 1 at temperature 0, got {samples}: all would be alike", "n")


class ApiFrontend(Protocol):
    """One API: reads requests, writes answers, and errors in its own shape."""

    path: str

    async def read(self, body: bytes, headers: Mapping[str, str]) -> ApiRequest:
        """Return the request. Raises TurnError for one that the API would refuse."""
        ...

    def error(self, error: TurnError) -> bytes:
        """Return the body of an error answer."""
        ...

    def broken(self, error: TurnError) -> bytes:
        """Return the event of an error after the stream has begun, with the stream's end."""
        ...

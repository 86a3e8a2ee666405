"""Reading side of an API frontend: a request's body and headers become turns.

A field of the body overrides its header. A field that would change the answer and cannot be
honoured is refused, never dropped in silence.
"""

import inspect
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, TypeVar

import msgspec
from msgspec import structs

from rose.contract.gateway import (
    EVENT_ID_HEADER,
    GROUP_HEADER,
    JOB_HEADER,
    MAX_GROUP_SIZE,
    MAX_NAME_CHARS,
    REQUEST_ID_HEADER,
    SESSION_ALIASES,
    SESSION_HEADER,
    TIMEOUT_HEADER,
    TurnFields,
)
from rose.contract.replica import MOST_LOGPROBS, Sampling
from rose.errors import decoded
from rose.gateway.apis.wire import DONE, ApiResponse, event, vllm_error
from rose.gateway.errors import BadRequest, TurnError
from rose.gateway.images import GivenImages, KeptImages
from rose.gateway.sessions import KeptSessions
from rose.gateway.text_codec import ServedModel, TextPlan
from rose.gateway.turn_request import Origin, TurnRequest, sample_of
from rose.images import Image
from rose.security.callers import ANYBODY, Caller
from rose.tracing import trace_of

# Fields that must be empty are not decoded: millions of small objects would block the loop.
NOTHING = msgspec.Raw(b"null")
MAX_NOTHING_BYTES = 64
MAX_DIGITS = 15
# Engines sample greedily at temperatures below this one.
GREEDY_BELOW = 1e-5
MAX_STOPS = 256
MAX_STOP_CHARS = 4_096
T = TypeVar("T")


class GenerateFields(TurnFields, gc=False, kw_only=True):
    """Request fields that all generate routes share, besides those of `TurnFields`."""

    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = 0


@dataclass(slots=True)
class ApiRequest:
    """One parsed request of an API: its turns, the writer of its answer, and how it is delivered.

    resume_from: number of tokens that a reconnecting reader already has. event_ids: True if it
    wants event ids, which are token counts. at_end: True if nothing can be sent before the turns
    are over; a stream begins then.
    """

    turns: list[TurnRequest]
    stream: bool
    answer: ApiResponse
    resume_from: int = 0
    event_ids: bool = False
    at_end: bool = False


class ApiFrontend:
    """Base of one HTTP API: it reads requests into turns, and writes answers and errors in the
    API's shape, by default vLLM's.
    """

    path: ClassVar[str]

    def __init__(
        self,
        model: ServedModel,
        max_completions: int,
        sessions: KeptSessions | None = None,
        images: KeptImages | None = None,
    ) -> None:
        self._model = model
        self._max_completions = max_completions
        self._sessions = sessions
        self._images = images

    async def read(
        self, body: bytes, headers: Mapping[str, str], caller: Caller = ANYBODY
    ) -> ApiRequest:
        """Return the parsed request. Raises TurnError for a request that the API would refuse.
        `caller`: owner of the session that the request may name.
        """
        raise NotImplementedError

    async def _taken(
        self, given: GivenImages, asked: TurnFields, headers: Mapping[str, str], caller: Caller
    ) -> tuple[Image, ...]:
        """Return the images of a request. Raises TurnError."""
        if self._images is None:
            raise BadRequest("images: this gateway takes none", "images")
        return await self._images.taken(given, caller, job_of(headers, asked.job))

    def error(self, error: TurnError) -> bytes:
        """Return the JSON body of the error response for this error, in the API's shape."""
        return vllm_error(error)

    def broken(self, error: TurnError) -> bytes:
        """Return the server-sent events for an error after the stream has begun: the error, then
        the stream's end.
        """
        return event(self.error(error)) + DONE


def read_json(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """Return the decoded body. Raises BadRequest, which says what is wrong in it."""
    try:
        return decoded(decoder, body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"1 validation error: {error}", "body") from error


# ---- the turns of a request ----


def request_of(
    asked: GenerateFields,
    headers: Mapping[str, str],
    turns: list[TurnRequest],
    answer: ApiResponse,
    *,
    at_end: bool = False,
) -> ApiRequest:
    """Return the ApiRequest of these turns, with stream options from body and headers. Raises
    BadRequest for an invalid place to resume from.
    """
    start, event_ids = resume_of(headers, asked.resume_from)
    return ApiRequest(turns, bool(asked.stream), answer, start, event_ids, at_end)


def turns_of(
    asked: GenerateFields,
    headers: Mapping[str, str],
    name: tuple[str | list[str], bool],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    *,
    samples: int = 1,
    text: TextPlan | None = None,
    images: tuple[Image, ...] = (),
) -> list[TurnRequest]:
    """Return the turns of a request: turn k is sample k mod `samples` of prompt k // `samples`.

    name: the request's id, to which a number is added if there are several turns, or one id for
    each turn; and True if the caller chose it. Raises BadRequest for fields that no turn can have.
    """
    count = len(prompts) * samples
    given_start = sampling.routed_experts_prompt_start
    # vLLM's APIs may have a start without asking for experts.
    start = (given_start or 0) if asked.routed_experts else None
    if start and start >= min(map(len, prompts)):
        raise BadRequest("routed_experts_prompt_start: below the prompt's length", "routed_experts")
    if start != given_start:
        sampling = structs.replace(sampling, routed_experts_prompt_start=start)
    given, named = name
    several = [f"{given}-{k}" for k in range(count)] if count > 1 else [str(given)]
    origin, timeout_s = origin_of(headers, asked), timeout_of(headers, asked.timeout_s)
    return [
        TurnRequest(
            request_id=request_id,
            token_ids=prompts[k // samples],
            sampling=sample_of(sampling, k % samples),
            origin=origin,
            min_version=asked.min_version,
            exact_version=asked.exact_version,
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt,
            timeout_s=timeout_s,
            named=named,
            text=text,
            batch=count > 1,
            images=images,
        )
        for k, request_id in enumerate(given if isinstance(given, list) else several)
    ]


def request_id_of(headers: Mapping[str, str], given: str | None) -> tuple[str, bool]:
    """Return a request's id and True if the caller chose it: from the header, else the body's
    `given`; else a new random id and False.
    """
    name = header_of(headers, REQUEST_ID_HEADER) or given
    return (name, True) if name else (uuid.uuid4().hex, False)


def origin_of(headers: Mapping[str, str], body: TurnFields) -> Origin:
    """Return the names that a request carries (session, group, job) with its hedging and trace.
    Raises BadRequest for an invalid name or hedging.
    """
    size, hedges = body.group_size or 0, body.hedges or 0
    origin = Origin(
        session_of(headers, body.session_id),
        _name(headers.get(GROUP_HEADER) or body.group_id, "group_id"),
        job_of(headers, body.job),
        size,
        hedges,
        trace=trace_of(headers),
    )
    if not 0 <= size <= MAX_GROUP_SIZE:
        raise BadRequest(f"group_size is at most {MAX_GROUP_SIZE}", "group_size")
    if not 0 <= hedges <= size:
        raise BadRequest("hedges: at least 0, at most group_size, which goes with it", "hedges")
    if hedges and not origin.group:
        raise BadRequest("hedges needs the group_id that all turns of the group share", "hedges")
    if hedges and body.stream:
        raise BadRequest(
            "hedges: a second copy may answer first, and tokens of a stream cannot be taken back; "
            "leave out hedges or stream",
            "hedges",
        )
    return origin


def session_of(headers: Mapping[str, str], given: str | None) -> str:
    """Return the request's session, the name of its trajectory: from the header, else the field
    `given`, else a header of another product; "" for none.

    Raises BadRequest for an invalid name.
    """
    named = headers.get(SESSION_HEADER) or given
    if not named:
        named = next((value for name in SESSION_ALIASES if (value := headers.get(name))), None)
    return _name(named, "session_id")


def job_of(headers: Mapping[str, str], given: str | None) -> str:
    """Return the request's job from its header, else the field `given`; "" for none. Raises
    BadRequest for an invalid name.
    """
    return _name(headers.get(JOB_HEADER) or given, "job")


def _name(given: str | None, field: str) -> str:
    if given and (len(given) > MAX_NAME_CHARS or not given.isprintable()):
        raise BadRequest(f"{field}: send at most {MAX_NAME_CHARS} printable characters", field)
    return given or ""


# ---- headers ----


def header_of(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header's text, None if it is not sent. Raises BadRequest if it is not UTF-8."""
    text = headers.get(name)
    try:
        # The server keeps undecodable bytes as surrogates, which no answer and no log can hold.
        if text is not None and not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} is not UTF-8", name) from error
    return text


def timeout_of(headers: Mapping[str, str], body_s: float | None) -> float | None:
    """Return the caller's timeout in seconds: the body's field, else the header; None for none.
    Raises BadRequest for a header that is not a number.
    """
    text = header_of(headers, TIMEOUT_HEADER)
    if body_s is not None or text is None:
        return body_s
    try:
        return float(text)
    except ValueError as error:
        raise BadRequest(f"{TIMEOUT_HEADER} is a number of seconds, not {text[:40]!r}") from error


def resume_of(headers: Mapping[str, str], body_from: int | None) -> tuple[int, bool]:
    """Return the number of tokens that the caller already has, and True if it sent Last-Event-ID
    and so wants event ids. Raises BadRequest.
    """
    text = header_of(headers, EVENT_ID_HEADER)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise BadRequest(f"{EVENT_ID_HEADER} is a number of tokens, not {text[:40]!r}")
    start = body_from if body_from is not None else int(text or 0)
    if not 0 <= start < 10**MAX_DIGITS:
        raise BadRequest(
            f"resume_from is a number of tokens: at least 0, at most {MAX_DIGITS} digits",
            "resume_from",
        )
    return start, text is not None


# ---- checks ----


def refuse_unsupported(asked: msgspec.Struct, kind: type[msgspec.Struct]) -> None:
    """Raise BadRequest if a field that `kind` itself declares is not at its default.

    `kind` is the base of the body with the fields that no replica can honour. Their defaults change
    nothing, and neither do None and other empty values.
    """
    for name, neutral in _neutral_values(kind):
        given = getattr(asked, name)
        if given is NOTHING or given is None or given == neutral:
            # The field was not sent, like nearly all of them.
            continue
        given = _unread(given)
        if given is None or given == neutral or (not given and not neutral):
            continue
        raise BadRequest(f"rollout replicas do not know {name}: leave it out", name)


def refuse_changed(asked: msgspec.Struct, kind: type[msgspec.Struct], *names: str) -> None:
    """Raise BadRequest if one of these fields of `kind` is not at its default: the answer's form
    has no place for what it asks for.
    """
    for field in structs.fields(kind):
        if field.name in names and getattr(asked, field.name) not in (None, field.default):
            raise BadRequest(f"{field.name} is not of this API: leave it out", field.name)


@cache
def _neutral_values(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    own = inspect.get_annotations(kind)
    values = [(each.name, each.default) for each in structs.fields(kind) if each.name in own]
    return tuple((name, None if value is NOTHING else value) for name, value in values)


def _unread(value: object) -> object:
    """Return the value of a raw JSON field that should be empty, or its bytes if they are too long
    to be. Raises BadRequest for invalid JSON.
    """
    if not isinstance(value, msgspec.Raw):
        return value
    data = bytes(value)
    if len(data) > MAX_NOTHING_BYTES:
        return data
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"1 validation error: {error}", "body") from error


def check_completions(count: int, most: int, field: str) -> None:
    """Raise BadRequest for a number of completions in one request below 1 or above `most`; `field`
    is named in the error.
    """
    if count < 1:
        raise BadRequest(f"{field}: at least 1 completion, got {count}", field)
    if count > most:
        raise BadRequest(
            f"{field}: {count} completions in one request, this gateway takes {most}: send several "
            "requests, or start it with a higher --max-completions",
            field,
        )


def check_samples(samples: int, most: int, temperature: float | None) -> None:
    """Raise BadRequest for a number of samples to a prompt below 1 or above `most`, or for several
    at temperature 0.
    """
    check_completions(samples, most, "n")
    if samples > 1 and temperature is not None and temperature < GREEDY_BELOW:
        raise BadRequest(f"n must be 1 at temperature 0, got {samples}: all would be alike", "n")


def most_likely(given: int | None, name: str, *, counts_sampled: bool = False) -> int:
    """Return `Sampling.logprobs` for the field `name`. Raises BadRequest for a number that replicas
    do not give.

    counts_sampled: True for a field in which the sampled token is the first of that many.
    """
    most = given or 0
    if not 0 <= most <= MOST_LOGPROBS:
        raise BadRequest(f"{name}: from 0 to {MOST_LOGPROBS}, got {most}", name)
    return 0 if counts_sampled and most == 1 else most


def check_prompt_logprobs(asked: int | None, stream: bool | None) -> None:
    """Raise BadRequest if logprobs of the prompt are wanted in a stream."""
    if asked is not None and stream:
        raise BadRequest(
            "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"
        )


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a request as a tuple. Raises BadRequest for too many, too long or
    empty ones.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS or not all(stops):
        raise BadRequest(
            f"stop: at most {MAX_STOPS} strings of together {MAX_STOP_CHARS} characters, "
            "none of them empty",
            "stop",
        )
    return stops


def text_plan(
    model: ServedModel,
    stops: tuple[str, ...],
    include_stop: bool | None,
    skip_special_tokens: bool | None,
    min_tokens: int | None,
) -> TextPlan | None:
    """Return the plan by which a turn's output becomes text, None without a tokenizer.

    Raises BadRequest for stop strings without a tokenizer.
    """
    if stops:
        model.need_codec("a stop string")
    if model.codec is None:
        return None
    special = skip_special_tokens is not False
    return TextPlan(model.codec, stops, bool(include_stop), special, min_tokens or 0)

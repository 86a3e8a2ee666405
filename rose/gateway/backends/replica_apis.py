"""APIs of replicas: ROSE's own endpoint, a stock vLLM and a stock SGLang. No IO.

A backend encodes the request that continues a turn, and reads the lines of its answer.

rose    `POST /rose/v1/generate`, NDJSON, every token with its version
vllm    `POST /v1/completions` with token ids, streamed. Its tokens-in-tokens-out route would fit
        better, but a server has it only with `--enable-scale-out`; this one every vLLM since 0.10.2
        has. Its priorities need a scheduling policy that a stock server does not have on, so none
        is sent. Omitted fields would come from the model's generation config.
sglang  `POST /generate`, streamed. By default each event repeats the whole output so far, with
        `--incremental-streaming-output` it has only the new part: `completion_tokens` tells the two
        apart.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec
from msgspec import UNSET, structs

from elastic_scheduler import Attempt
from rose.contract.fields import Logprob, SampledId
from rose.contract.replica import (
    GENERATE,
    MAX_LINE_BYTES,
    GenerateBody,
    StreamLine,
    StructuredOutputs,
    top_rows,
)
from rose.errors import RoseError
from rose.gateway.errors import BadRequest
from rose.gateway.replicas.table import ReplicaApi
from rose.gateway.turn_request import TurnRequest

MAX_EVENT_BYTES = 1 << 20
# An event of SGLang may hold a whole long output with its logprobs.
MAX_REPEATED_BYTES = 32 << 20
ID_PREFIX = "token_id:"
ANY_OBJECT = '{"type": "object"}'
# Fields of SGLang that are not left out at 0.
SENT_AT_ZERO = frozenset({"temperature", "sampling_seed"})
_encode = msgspec.json.Encoder().encode


class BackendError(RoseError):
    """Error raised when a replica's answer does not have its API's shape."""


class Lines:
    """Splitter of a byte stream into lines, which keeps an unfinished line for the next call."""

    __slots__ = ("_max_bytes", "_rest")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    def split(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without line ends. Raises BackendError for a line
        above `max_bytes`.
        """
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > self._max_bytes:
            raise BackendError(f"a line above {self._max_bytes} bytes")
        return lines

    def events(self, data: bytes) -> list[bytes]:
        """Return the payloads of the server-sent `data:` lines that `data` completes, without
        `[DONE]`. Raises BackendError.
        """
        found = [line[5:].strip() for line in self.split(data) if line.startswith(b"data:")]
        return [payload for payload in found if payload != b"[DONE]"]


class AnswerReader:
    """Decoder of one replica's answer: `split` cuts its bytes into records, `line_of` decodes each
    into a StreamLine.
    """

    __slots__ = ("_line_of", "_split")

    def __init__(
        self, split: Callable[[bytes], list[bytes]], line_of: Callable[[bytes], StreamLine]
    ) -> None:
        self._split = split
        self._line_of = line_of

    def feed(self, data: bytes) -> list[StreamLine]:
        """Return the StreamLines of the records that `data` completes. Raises BackendError,
        msgspec.MsgspecError, or BadRequest if the replica reports a fault of the request.
        """
        return [self._line_of(record) for record in self._split(data) if record]


class ReplicaBackend(Protocol):
    """Interface of one replica API: it encodes requests and gives readers of answers; it keeps no
    state.

    batches: True if the API has a route for several turns at once. path: route of a turn's request.
    """

    batches: bool
    path: str

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        """Return the JSON body of the request that continues a turn. Raises BadRequest for fields
        that the API lacks.
        """
        ...

    def reader(self, most: int = 0) -> AnswerReader:
        """Return a new decoder of one answer's bytes, which keeps that answer's state.

        most: `Sampling.logprobs` of the turn.
        """
        ...


class _Fault(msgspec.Struct, gc=False):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


# Statuses that are not the caller's fault: a slow request, an id that the engine still knows, too
# many requests.
_OWN_FAULTS = frozenset({408, 409, 429})
_decode_fault = msgspec.json.Decoder(_Fault).decode


class _FaultBody(msgspec.Struct, gc=False):
    error: _Fault


_decode_fault_body = msgspec.json.Decoder(_FaultBody).decode


def fault_message(body: bytes) -> str:
    """Return what an error answer of a replica says: its `error.message`, else all of it."""
    with suppress(msgspec.DecodeError):
        if message := _decode_fault_body(body).error.message:
            return message
    return body.decode("utf-8", "replace")


def error_line(raw: msgspec.Raw) -> StreamLine:
    """Return the last line of an answer that ends with the error object of OpenAI's API.

    Raises BadRequest if the error is the caller's.
    """
    fault = _decode_fault(raw)
    refuse(fault.code, fault.message, fault.param)
    return StreamLine(finish_reason="error", message=bytes(raw)[:500].decode("utf-8", "replace"))


def refuse(code: int | str | None, message: str | None, param: str | None = None) -> None:
    """Raise BadRequest if the status is a 4xx code that means that the request itself is wrong."""
    if isinstance(code, int) and 400 <= code < 500 and code not in _OWN_FAULTS:
        raise BadRequest(f"refuses the turn: {message or code}", param)


# ---- ROSE ----

_decode_line = msgspec.json.Decoder(StreamLine).decode


class RoseBackend:
    """API of ROSE's own replica endpoint: token ids in, tokens with policy versions out."""

    batches = True
    path = GENERATE

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        return _encode(
            GenerateBody(
                request.attempt_id(attempt.number),
                attempt.token_ids,
                request.sampling.rest(attempt.max_tokens, len(attempt.token_ids)),
                request.salt,
                request.priority,
                request.job,
                tuple([image.sha256 for image in request.images]) if request.images else UNSET,
            )
        )

    def reader(self, most: int = 0) -> AnswerReader:
        del most
        return AnswerReader(Lines(MAX_LINE_BYTES).split, _decode_line)


# ---- vLLM ----


class _VllmLogprobs(msgspec.Struct, gc=False):
    token_logprobs: list[Logprob | None] = []
    top_logprobs: list[dict[str, Logprob | None] | None] | None = None


class _VllmChoice(msgspec.Struct, gc=False):
    token_ids: list[SampledId] | None = None
    logprobs: _VllmLogprobs | None = None
    finish_reason: str | None = None


class _VllmEvent(msgspec.Struct, gc=False):
    choices: list[_VllmChoice] = []
    error: msgspec.Raw = msgspec.Raw(b"")


_decode_vllm = msgspec.json.Decoder(_VllmEvent).decode


class VllmBackend:
    """API of a stock vLLM: token ids in, tokens without policy versions out."""

    batches = False
    path = "/v1/completions"

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        """Return the JSON body of the request. Raises BadRequest for prompt logprobs, which vLLM
        does not stream.
        """
        if request.sampling.prompt_logprobs is not None:
            raise BadRequest(
                "prompt_logprobs: a stock vLLM replica gives none in a stream; use one of ROSE",
                "prompt_logprobs",
            )
        _refuse_of_rose(request)
        fields = structs.asdict(request.sampling.rest(attempt.max_tokens))
        del fields["routed_experts_prompt_start"], fields["deterministic"]
        # The names are vLLM's already.
        fields.update(
            prompt=attempt.token_ids,
            request_id=request.attempt_id(attempt.number),
            stop_token_ids=fields["stop_token_ids"] or (),
            cache_salt=request.cache_salt,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            stream=True,
        )
        return _encode(fields)

    def reader(self, most: int = 0) -> AnswerReader:
        return AnswerReader(Lines(MAX_EVENT_BYTES).events, partial(_vllm_line, most=most))


def _vllm_line(data: bytes, most: int = 0) -> StreamLine:
    event = _decode_vllm(data)
    if bytes(event.error):
        return error_line(event.error)
    if not event.choices:
        return StreamLine()
    choice = event.choices[0]
    tokens = choice.token_ids or []
    given = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    logprobs = [_number(logprob) for logprob in given]
    if len(logprobs) != len(tokens):
        raise BackendError(
            f"{len(tokens)} token ids came with {len(logprobs)} logprobs; "
            "vLLM sends both since version 0.10.2"
        )
    tops = None if choice.logprobs is None else choice.logprobs.top_logprobs
    return StreamLine(
        tokens,
        logprobs,
        finish_reason=choice.finish_reason,
        top_logprobs=None if not most or tops is None else b"".join(_vllm_rows(tops, most)),
    )


def _vllm_rows(tops: Sequence[dict[str, Logprob | None] | None], most: int) -> Iterator[bytes]:
    """Yield the `most` most likely tokens at each token. vLLM adds the sampled one, which is the
    least likely if it is not among them.
    """
    for place in tops:
        pairs = [(_number(logprob), _token_id(name)) for name, logprob in (place or {}).items()]
        yield _row(sorted(pairs, reverse=True), most)


def _row(pairs: Sequence[tuple[float, int]], most: int) -> bytes:
    """Return the first `most` (logprob, token id) pairs as `StreamLine.top_logprobs` has them."""
    if len(pairs) < most:
        raise BackendError(f"a token came with logprobs of {len(pairs)} tokens, not of {most}")
    kept = pairs[:most]
    return top_rows(most).pack(*[pair[1] for pair in kept], *[pair[0] for pair in kept])


def _token_id(name: str) -> int:
    number = name.removeprefix(ID_PREFIX)
    # Not more digits than the bound of SampledId has.
    found = int(number) if number.isascii() and number.isdecimal() and len(number) <= 10 else -1
    if not 0 <= found < 1 << 31:
        raise BackendError(f"a likely token is called {name[:80]!r}, which is no token's id")
    return found


def _number(logprob: float | None) -> float:
    return float("nan") if logprob is None else logprob


# ---- SGLang ----


class _SglangFinish(msgspec.Struct, gc=False):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _SglangMeta(msgspec.Struct, gc=False):
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[Logprob | None, int, object]] = []
    output_top_logprobs: list[list[tuple[Logprob | None, SampledId, object]] | None] | None = None
    finish_reason: _SglangFinish | None = None


class _SglangEvent(msgspec.Struct, gc=False):
    output_ids: list[SampledId] = []
    meta_info: _SglangMeta = msgspec.field(default_factory=_SglangMeta)
    error: msgspec.Raw = msgspec.Raw(b"")


_decode_sglang = msgspec.json.Decoder(_SglangEvent).decode


class SglangBackend:
    """API of a stock SGLang: token ids in, tokens without policy versions out."""

    batches = False
    path = "/generate"

    def encode(self, request: TurnRequest, attempt: Attempt) -> bytes:
        """Return the JSON body of the request. Raises BadRequest for fields that SGLang has no
        parameter for.
        """
        rest = request.sampling.rest(attempt.max_tokens)
        _refuse_for_sglang(request)
        wish = rest.structured_outputs or StructuredOutputs()
        fields = {
            "max_new_tokens": rest.max_tokens,
            "temperature": rest.temperature,
            "top_p": rest.top_p,
            "top_k": rest.top_k or -1,
            "min_new_tokens": rest.min_tokens,
            "stop_token_ids": rest.stop_token_ids,
            "sampling_seed": rest.seed,
            "no_stop_trim": True,
            "min_p": rest.min_p,
            "frequency_penalty": rest.frequency_penalty,
            "presence_penalty": rest.presence_penalty,
            "ignore_eos": rest.ignore_eos,
            "json_schema": wish.json or (ANY_OBJECT if wish.json_object else None),
            "regex": wish.regex,
        }
        # A field without effect is left out, since not every version knows each of them.
        sampling = {
            name: value
            for name, value in fields.items()
            if value or (value is not None and name in SENT_AT_ZERO)
        }
        rid = request.attempt_id(attempt.number)
        return _encode(
            {
                "rid": rid,
                "input_ids": attempt.token_ids,
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": -1,
                "stream": True,
                **({"top_logprobs_num": rest.logprobs} if rest.logprobs else {}),
            }
        )

    def reader(self, most: int = 0) -> AnswerReader:
        return AnswerReader(Lines(MAX_REPEATED_BYTES).events, _SglangOutput(most).line)


def _refuse_of_rose(request: TurnRequest) -> None:
    """Raise BadRequest for what replicas of ROSE alone give, or say that they do not."""
    asked = request.sampling
    if request.images:
        raise BadRequest("images: a stock replica is sent none; use one of ROSE", "images")
    if asked.deterministic:
        raise BadRequest(
            "deterministic: a stock replica does not tell whether it is; use one of ROSE",
            "deterministic",
        )
    if asked.routed_experts_prompt_start is not None:
        raise BadRequest(
            "routed_experts: a stock replica gives none in a stream; use one of ROSE",
            "routed_experts",
        )


def _refuse_for_sglang(request: TurnRequest) -> None:
    """Raise BadRequest for fields that SGLang has no equal parameter for."""
    _refuse_of_rose(request)
    asked = request.sampling
    if asked.allowed_token_ids is not None:
        raise BadRequest("allowed_token_ids: an SGLang replica cannot restrict the sampling")
    if asked.repetition_penalty != 1.0:
        # Some of its versions count the output alone.
        raise BadRequest(
            "repetition_penalty: an SGLang replica counts other tokens than vLLM; leave it out",
            "repetition_penalty",
        )
    if asked.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: an SGLang replica gives none here", "prompt_logprobs")
    wish = asked.structured_outputs
    if wish is not None and not (wish.json or wish.regex or wish.json_object):
        raise BadRequest(
            "structured_outputs: an SGLang replica knows json, json_object and regex alone",
            "structured_outputs",
        )


class _SglangOutput:
    """Decoder of one turn's events, which counts the tokens that were read, since events may repeat
    them.
    """

    __slots__ = ("_most", "_seen")

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._seen = 0

    def line(self, data: bytes) -> StreamLine:
        event = _decode_sglang(data)
        if bytes(event.error):
            return error_line(event.error)
        meta = event.meta_info
        new = meta.completion_tokens - self._seen
        if not 0 <= new <= min(len(event.output_ids), len(meta.output_token_logprobs)):
            raise BackendError(f"{new} new tokens, but not as many ids and logprobs")
        self._seen += new
        tokens = event.output_ids[len(event.output_ids) - new :]
        rows = meta.output_token_logprobs[len(meta.output_token_logprobs) - new :]
        if [row[1] for row in rows] != tokens:
            raise BackendError("its logprobs are of other tokens than its output")
        finish = meta.finish_reason
        if finish is not None:
            refuse(finish.status_code, finish.message)
        tops = meta.output_top_logprobs if self._most else None
        return StreamLine(
            tokens,
            [_number(row[0]) for row in rows],
            finish_reason=None if finish is None else finish.type,
            message=None if finish is None else finish.message,
            top_logprobs=None if tops is None else self._top_rows(tops[len(tops) - new :]),
        )

    def _top_rows(self, tops: list[list[tuple[Logprob | None, int, object]] | None]) -> bytes:
        places = [[(_number(row[0]), row[1]) for row in place or ()] for place in tops]
        return b"".join([_row(place, self._most) for place in places])


LINKS: dict[ReplicaApi, ReplicaBackend] = {
    ReplicaApi.ROSE: RoseBackend(),
    ReplicaApi.VLLM: VllmBackend(),
    ReplicaApi.SGLANG: SglangBackend(),
}

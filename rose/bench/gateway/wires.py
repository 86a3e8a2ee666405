"""The APIs that are measured: what a request looks like, and where its stamps are in an answer.

The stand-in engine writes two times of CLOCK_MONOTONIC into every chunk, where logprobs or text
would be: when it wrote the chunk and, always earlier, when the request reached it. All processes
share the clock, so each chunk says by itself how long it was under way.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

# What stand-in and real engines call what they serve.
MODEL = "policy"
_LOGPROB = re.compile(rb"-([\d.]+)")
_LINE_LOGPROBS = re.compile(rb'"logprobs":\[([^\]]*)\]')
_EVENT_LOGPROB = re.compile(rb'"logprob":-([\d.]+)')
_TEXT = re.compile(rb'"text":"([\d.]+) ([\d.]+)')

# Gateways look at logprobs: a time is a small negative number there.
_LOGPROB_S = 1e6

Stamps = Callable[[bytes], list[float]]


def as_logprob(stamp_s: float) -> str:
    """A time as the stand-in engine writes it in a logprob's place."""
    return f"{-stamp_s / _LOGPROB_S:.13f}"


@dataclass(frozen=True, slots=True)
class Wire:
    """One API. `stamps` finds all times in a piece of an answer, any number of times each.

    With `real_chunk`, which every chunk has once, the engine is a real one: of its chunks only
    their arrival is known.
    """

    name: str
    path: str
    body: Callable[[str, Sequence[int], int], bytes]
    stamps: Stamps
    whole: bool = False
    real_chunk: bytes = b""

    def request(self, request_id: str, session: str, prompt: Sequence[int], budget: int) -> bytes:
        """All bytes of one request."""
        body = self.body(request_id, prompt, budget)
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"X-Session-ID: {session}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def _replica_body(request_id: str, prompt: Sequence[int], budget: int) -> bytes:
    sampling = {"temperature": 1.0, "max_tokens": budget}
    body = {"request_id": request_id, "token_ids": prompt, "sampling": sampling}
    return msgspec.json.encode(body)


def _tokens_body(request_id: str, prompt: Sequence[int], budget: int) -> bytes:
    sampling = {"temperature": 1.0, "max_tokens": budget, "logprobs": 1}
    body = {"request_id": request_id, "token_ids": prompt, "sampling_params": sampling}
    return msgspec.json.encode(body)


def _token_stream_body(request_id: str, prompt: Sequence[int], budget: int) -> bytes:
    return _tokens_body(request_id, prompt, budget)[:-1] + b',"stream":true}'


def _completion_body(request_id: str, prompt: Sequence[int], budget: int) -> bytes:
    del request_id
    body = {"model": MODEL, "prompt": prompt, "max_tokens": budget, "stream": True}
    return msgspec.json.encode(body)


def _trainer_completion_body(request_id: str, prompt: Sequence[int], budget: int) -> bytes:
    """What a trainer needs of an engine that it asks directly, as the gateway always asks it."""
    del request_id
    body = {"model": MODEL, "prompt": prompt, "max_tokens": budget, "stream": True}
    return msgspec.json.encode(body | {"logprobs": 0, "return_token_ids": True})


def _sglang_body(request_id: str, prompt: Sequence[int], budget: int) -> bytes:
    sampling = {"temperature": 1.0, "max_new_tokens": budget}
    body = {"rid": request_id, "input_ids": prompt, "sampling_params": sampling, "stream": True}
    return msgspec.json.encode(body)


def _of_lines(data: bytes) -> list[float]:
    found = _LINE_LOGPROBS.findall(data)
    return [_LOGPROB_S * float(number) for each in found for number in _LOGPROB.findall(each)]


def _of_events(data: bytes) -> list[float]:
    return [_LOGPROB_S * float(number) for number in _EVENT_LOGPROB.findall(data)]


def _of_text(data: bytes) -> list[float]:
    return [float(number) for found in _TEXT.findall(data) for number in found]


REPLICA = Wire("replica lines", "/rose/v1/generate", _replica_body, _of_lines)
TOKENS = Wire("tokens, whole", "/inference/v1/generate", _tokens_body, _of_events, whole=True)
TOKEN_STREAM = Wire("tokens", "/inference/v1/generate", _token_stream_body, _of_events)
COMPLETIONS = Wire("completions", "/v1/completions", _completion_body, _of_text)
SGLANG = Wire("generate", "/generate", _sglang_body, _of_text)
REAL_TEXT = Wire(
    "completions, real",
    "/v1/completions",
    _trainer_completion_body,
    _of_text,
    real_chunk=b'"text":"',
)
REAL_TOKENS = replace(TOKEN_STREAM, name="tokens, real", real_chunk=b'"token_ids":[')
_ALL = (REPLICA, TOKENS, TOKEN_STREAM, COMPLETIONS, SGLANG, REAL_TEXT, REAL_TOKENS)
WIRES = {wire.name: wire for wire in _ALL}

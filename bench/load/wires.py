"""APIs that turns go over, and the times that the stand-in engine writes into their chunks.

The stand-in engine writes two times of CLOCK_MONOTONIC into every chunk, where logprobs or text
would be: its own time, and, always earlier, the arrival of the request. All processes share the
clock, so each chunk says by itself how long it was under way.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from bench.load.caller import request_of

# Name of the model at stand-in and real engines.
MODEL = "policy"
_LOGPROB = re.compile(rb"-([\d.]+)")
_LINE_LOGPROBS = re.compile(rb'"logprobs":\[([^\]]*)\]')
_EVENT_LOGPROB = re.compile(rb'"logprob":-([\d.]+)')
_TEXT = re.compile(rb'"text":"([\d.]+) ([\d.]+)')

# Gateways look at logprobs: a time is a small negative number there.
_LOGPROB_S = 1e6

Body = Callable[[str, Sequence[int], int], dict[str, object]]
Stamps = Callable[[bytes], list[float]]


def as_logprob(stamp_s: float) -> str:
    """Return a time as the stand-in engine writes it in a logprob's place."""
    return f"{-stamp_s / _LOGPROB_S:.13f}"


@dataclass(frozen=True, slots=True)
class Wire:
    """One API. `stamps` finds all times in a piece of an answer, any number of times each.

    whole: answers come in one piece. real_chunk: a word that every chunk of a real engine has once;
    of such an engine only the arrival of its chunks is known.
    """

    name: str
    path: str
    body: Body
    stamps: Stamps
    whole: bool = False
    real_chunk: bytes = b""

    def request(
        self,
        request_id: str,
        session: str,
        prompt: Sequence[int],
        budget: int,
        more_head: bytes = b"",
    ) -> bytes:
        """Return all bytes of one request for `budget` tokens."""
        body = msgspec.json.encode(self.body(request_id, prompt, budget))
        head = f"X-Session-ID: {session}\r\n".encode() + more_head
        return request_of(self.path, body, more_head=head)


def _replica_body(request_id: str, prompt: Sequence[int], budget: int) -> dict[str, object]:
    sampling = {"temperature": 1.0, "max_tokens": budget}
    return {"request_id": request_id, "token_ids": prompt, "sampling": sampling}


def _tokens_body(request_id: str, prompt: Sequence[int], budget: int) -> dict[str, object]:
    sampling = {"temperature": 1.0, "max_tokens": budget, "logprobs": 1}
    return {"request_id": request_id, "token_ids": prompt, "sampling_params": sampling}


def _token_stream_body(request_id: str, prompt: Sequence[int], budget: int) -> dict[str, object]:
    return _tokens_body(request_id, prompt, budget) | {"stream": True}


def _completion_body(request_id: str, prompt: Sequence[int], budget: int) -> dict[str, object]:
    del request_id
    return {"model": MODEL, "prompt": prompt, "max_tokens": budget, "stream": True}


def _trainer_body(request_id: str, prompt: Sequence[int], budget: int) -> dict[str, object]:
    """Return the body of a trainer that asks an engine directly, as the gateway always asks it."""
    asked = _completion_body(request_id, prompt, budget)
    return asked | {"logprobs": 0, "return_token_ids": True}


def _sglang_body(request_id: str, prompt: Sequence[int], budget: int) -> dict[str, object]:
    sampling = {"temperature": 1.0, "max_new_tokens": budget}
    return {"rid": request_id, "input_ids": prompt, "sampling_params": sampling, "stream": True}


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
REAL_TEXT = replace(
    COMPLETIONS, name="completions, real", body=_trainer_body, real_chunk=b'"text":"'
)
REAL_TOKENS = replace(TOKEN_STREAM, name="tokens, real", real_chunk=b'"token_ids":[')
_ALL = (REPLICA, TOKENS, TOKEN_STREAM, COMPLETIONS, SGLANG, REAL_TEXT, REAL_TOKENS)
WIRES = {wire.name: wire for wire in _ALL}

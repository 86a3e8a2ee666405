"""What is compared, the engine itself, ROSE's gateway and other routers, and over which API.

The stand-in engine writes two times of CLOCK_MONOTONIC into every chunk, where logprobs or text
would be: when it wrote the chunk and, always earlier, when the request reached it. All processes
share the clock, so each chunk says by itself how long it was under way.
"""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import msgspec

from rose.errors import ConfigError

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
            f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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


DIRECT, ROSE = "direct", "rose"
# Peers by the module that holds them; all take the same options.
PEERS = {"vllm-router": "vllm_router", "sglang-router": "sglang_router"}
# sglang-router takes token ids on SGLang's own route only.
PEER_WIRES = {"vllm-router": COMPLETIONS, "sglang-router": SGLANG}
MANY = "100000"


@dataclass(frozen=True, slots=True)
class GatewayArm:
    """One way to the engine. `router` is whose process stands between, DIRECT for nobody's.

    `stock`: the engine is one without ROSE. `baseline`: the wire of the direct arm beside it.
    """

    router: str
    wire: Wire
    baseline: Wire
    stock: bool = False

    @property
    def engine(self) -> str:
        """As the table says it; it is never a real one's name."""
        return "standin stock" if self.stock else "standin replica"

    @property
    def process(self) -> str:
        """The router process: ROSE's gateway runs once for each kind of engine."""
        return f"{self.router}-stock" if self.router == ROSE and self.stock else self.router


def arms_over_standin(peers: Sequence[str]) -> list[GatewayArm]:
    """All arms of one round."""
    arms = [
        GatewayArm(DIRECT, REPLICA, REPLICA),
        GatewayArm(ROSE, TOKENS, REPLICA),
        GatewayArm(ROSE, TOKEN_STREAM, REPLICA),
        GatewayArm(DIRECT, COMPLETIONS, COMPLETIONS, stock=True),
        GatewayArm(ROSE, TOKEN_STREAM, COMPLETIONS, stock=True),
    ]
    wires = {peer: PEER_WIRES.get(peer, COMPLETIONS) for peer in peers}
    others = dict.fromkeys(wire for wire in wires.values() if wire is not COMPLETIONS)
    arms += [GatewayArm(DIRECT, wire, wire, stock=True) for wire in others]
    return arms + [GatewayArm(peer, wire, wire, stock=True) for peer, wire in wires.items()]


def rose_command(port: int, urls: Sequence[str], max_sequences: int) -> list[str]:
    """ROSE's gateway over replicas that are named."""
    replicas = [f"--replica=e{k}=dedicated={url}" for k, url in enumerate(urls)]
    return [
        sys.executable,
        "-m",
        "rose.main.gateway",
        f"--port={port}",
        f"--replica-max-sequences={max_sequences}",
        "--max-waiting=4096",
        *replicas,
    ]


def peer_command(text: str, port: int, metrics_port: int, urls: Sequence[str]) -> list[str]:
    """A peer's command line: `{port}`, `{metrics_port}` and `{urls}` filled in."""
    values = {"port": str(port), "metrics_port": str(metrics_port), "urls": " ".join(urls)}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return shlex.split(text)


def peers(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Commands by name: those that were given, and those that are installed; and who is missing."""
    found: dict[str, str] = {}
    for text in given:
        name, mark, command = text.partition("=")
        if not mark or "{port}" not in command or "{urls}" not in command:
            raise ConfigError(f"--peer {text}: write NAME=COMMAND with {{port}} and {{urls}} in it")
        found[name] = command
    missing = []
    for name, module in PEERS.items():
        if name in found:
            continue
        if find_spec(module) is None:
            missing.append(name)
            continue
        found[name] = (
            f"{shlex.quote(sys.executable)} -m {module}.launch_router --host 127.0.0.1"
            f" --port {{port}} --worker-urls {{urls}} --max-concurrent-requests {MANY}"
            f" --prometheus-port {{metrics_port}}"
        )
    return found, missing

"""The gateway's faces, fed with any bytes: callers' requests, and what replicas answer.

Each `run_…` takes one input and raises AssertionError where the gateway is at fault: an answer of
500, an error in no shape, tokens out of range, or an exception that nobody expects there.
"""

import asyncio
import functools
import itertools
import json
from collections.abc import Coroutine
from typing import Any, Final, NoReturn

import msgspec
from aiohttp import web

from elastic_scheduler import TurnNeed
from rose.gateway import GatewaySettings
from rose.gateway.apis import (
    ChatFrontend,
    CompletionFrontend,
    MessagesFrontend,
    ResponsesFrontend,
    SglangFrontend,
    VllmFrontend,
)
from rose.gateway.backends.http_pool import Upstream
from rose.gateway.backends.replica_apis import LINKS
from rose.gateway.errors import QueueFull, TurnError
from rose.gateway.replicas.dispatcher import Dispatcher
from rose.gateway.server import GatewayServer
from rose.gateway.stats import GatewayHealth, GatewayStats
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.attempt import ATTEMPT_FAILURES, check_line
from rose.process.http_port import guarded
from rose.tokenizer_pool.forms import MESSAGES, RESPONSES
from rose.tokenizer_pool.worker import Chat, Done, Follows, Refused, Setup, TextService
from tests.fuzz.wire import Wire, answers_of

DOCUMENTED = frozenset({200, 400, 404, 405, 408, 409, 413, 415, 417, 429, 503, 504})
MODEL = ServedModel("rose-policy", 4_096)
FRONTENDS = (
    VllmFrontend(MODEL, 256),
    SglangFrontend(MODEL, 256),
    CompletionFrontend(MODEL, 256),
    ChatFrontend(MODEL, 256),
    MessagesFrontend(MODEL, 256),
    ResponsesFrontend(MODEL, 256),
)
POSTS = (
    *(frontend.path for frontend in FRONTENDS),
    "/v1/messages/count_tokens",
    "/pooling",
    "/score",
    "/tokenize",
    "/detokenize",
    "/inference/v1/abort_requests",
    "/abort_request",
    "/finish_session",
)
HEADERS = (
    "X-Request-Id",
    "X-Request-Timeout",
    "Last-Event-ID",
    "X-Session-ID",
    "X-Group-ID",
    "X-SMG-Routing-Key",
    "X-Rose-Job",
    "Content-Encoding",
    "Transfer-Encoding",
    "Expect",
    "Content-Type",
)
GOOD = b'{"token_ids":[1],"sampling_params":{"max_tokens":2}}'
BUDGET = 64


def run_generate(data: bytes) -> None:
    """The body of each generating route."""
    for frontend in FRONTENDS:
        try:
            ask = _at_once(frontend.read(data, {}))
            for turn in ask.turns:
                turn.check()
                turn.fingerprint()
                turn.need()
        except TurnError as error:
            refusal = error
        else:
            continue
        assert 400 <= refusal.status < 500, refusal
        json.loads(frontend.error(refusal))


def run_headers(data: bytes) -> None:
    """A header of a good request: the first byte says which."""
    name = HEADERS[data[0] % len(HEADERS)] if data else HEADERS[0]
    value = data[1:4_096].translate(None, b"\r\n\0")
    head = (
        f"POST {VllmFrontend.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(GOOD)}\r\n{name}: "
    )
    _answered(head.encode() + value + b"\r\n\r\n" + GOOD)


def run_routes(data: bytes) -> None:
    """A body of a route: the first byte says of which."""
    path, body = POSTS[data[0] % len(POSTS)] if data else POSTS[0], data[1:]
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    statuses = _answered(head.encode() + body)
    assert len(statuses) == 1, (path, statuses)


def run_http(data: bytes) -> None:
    """Fuzz the bytes of a connection, HTTP or not."""
    _answered(data)


def run_replica(data: bytes) -> None:
    """Fuzz a replica's stream of each API, in two pieces."""
    for link in LINKS.values():
        reader = link.reader()
        try:
            half = len(data) // 2
            for line in [*reader.feed(data[:half]), *reader.feed(data[half:])]:
                check_line(line, BUDGET)
                assert all(0 <= token < 1 << 31 for token in line.token_ids)
                assert all(not logprob > 0.01 for logprob in line.logprobs)
                assert len(line.token_ids) == len(line.logprobs) <= BUDGET
                assert line.version < 1 << 63
        except ATTEMPT_FAILURES:
            continue


def run_conversation(data: bytes) -> None:
    """Messages of a chat, as the process that renders them takes them."""
    for continues, form in itertools.product((False, True), ("", MESSAGES, RESPONSES)):
        follows = Follows(b"") if form else None
        job = Chat(data, {}, not continues, continues, form=form, follows=follows)
        answer = _service().answer(job)
        assert isinstance(answer, Done | Refused)
        msgspec.msgpack.encode(answer)


class _Full(Dispatcher):
    """Has no place for any turn, so that none is waited for."""

    def check_admission(self, need: TurnNeed) -> NoReturn:
        """Always refuses."""
        raise QueueFull(f"{need.prompt_tokens} tokens find no place here")


def _healthy() -> GatewayHealth:
    return GatewayHealth([], 0, {})


class _Gateway:
    """A gateway without sockets, on an event loop that runs while an input is looked at."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.faults: list[tuple[str, dict[str, object]]] = []
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        settings = GatewaySettings(port=0, scheduler="127.0.0.1:1", max_body_bytes=1 << 20)
        stats, clock = GatewayStats(), asyncio.get_running_loop().time
        dispatcher = _Full(settings, stats, clock, self._note)
        self._server = GatewayServer(dispatcher, Upstream(), MODEL, _healthy)
        runner = web.AppRunner(self._server.application(), handler_cancellation=True)
        await runner.setup()
        assert runner.server is not None
        self.wire = Wire(guarded(runner.server, self._server.connections, self._server.answer))

    def _note(self, event: str, **fields: object) -> None:
        if event == "fault":
            self.faults.append((event, fields))


@functools.cache
def _gateway() -> _Gateway:
    return _Gateway()


@functools.cache
def _service() -> TextService:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = {letter: k for k, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ m.x.y }}"
        "{{ m | tojson }}{% endfor %}{{ messages[0].content[0] }}{{ eos_token }}"
    )
    return TextService(Setup(tokenizer.to_str(), template, template, {}, 10_000, 1 << 30, 5.0))


def _at_once(reading: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        reading.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a request without text waits while it is read")


def _answered(data: bytes) -> list[int]:
    """Statuses of all answers to the bytes, each of which is in its shape."""
    gateway = _gateway()
    sent = gateway.loop.run_until_complete(gateway.wire.sent_for(data))
    faults, gateway.faults = gateway.faults, []
    assert not faults, faults
    statuses = []
    for status, body in answers_of(sent):
        assert status in DOCUMENTED, (status, body)
        assert status == 200 or not body or json.loads(body)["error"]["message"], (status, body)
        statuses.append(status)
    return statuses


_ROUTES = (
    GOOD,
    b'{"input_ids":[1],"sampling_params":{"max_new_tokens":2}}',
    b'{"prompt":[1,2],"max_tokens":2,"n":2,"stop":["x"],"logprobs":1}',
    b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":2,"chat_template_kwargs":{"a":1}}',
    b'{"prompt":"hi","return_token_strs":true}',
    b'{"tokens":[1,2]}',
    b'{"request_ids":["a"]}',
    b'{"rid":"a"}',
    b'{"session_id":"s"}',
)
_VALUES = (
    b"a",
    b"2.5",
    b"7",
    b"s",
    b"g",
    b"j",
    b"gzip",
    b"chunked",
    b"100-continue",
    b"text/plain",
)
SEEDS: Final[dict[str, tuple[bytes, ...]]] = {
    "run_generate": (
        *_ROUTES[:4],
        b'{"token_ids":[1],"request_id":"r","session_id":"s","group_id":"g","group_size":4,'
        b'"hedges":1,"min_version":1,"priority":-1,"timeout_s":1.5,"resume_from":3,"stream":true,'
        b'"sampling_params":{"max_tokens":2,"n":2,"seed":3,"temperature":0.5,"logprobs":0}}',
    ),
    "run_routes": tuple(bytes([at]) + body for at, body in enumerate(_ROUTES)),
    "run_headers": tuple(bytes([at]) + value for at, value in enumerate(_VALUES)),
    "run_http": (
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        % (VllmFrontend.path.encode(), len(GOOD))
        + GOOD,
        b"POST /finish_session HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'12\r\n{"session_id": "s"}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n',
        b"GET /rose/v1/explain/%ff HTTP/1.0\r\n\r\n",
    ),
    "run_replica": (
        b'{"token_ids":[5],"logprobs":[-0.5],"version":3,"oldest_version":2}\n'
        b'{"finish_reason":"stop"}\n',
        b'data: {"choices":[{"token_ids":[5],"logprobs":{"content":[{"logprob":-0.5}]}}]}\n\n'
        b"data: [DONE]\n\n",
        b'data: {"output_ids":[5],"meta_info":{"output_token_logprobs":[[-0.5,5,null]],'
        b'"finish_reason":{"type":"stop"}}}\n\n',
    ),
    "run_conversation": (
        b'[{"role":"user","content":"hi"},{"role":"assistant","content":null,"x":{"y":[1]}}]',
    ),
}

"""Closed-loop load: streams of turns over bare sockets, and the times of every turn.

`python -m bench.load.streams` serves it in a process of its own. stdin, one JSON object a line:
{"urls", "wire", "load", "seed"}; stdout, one line each: `figures` of that cell. `{}` ends it.

The stand-in engine writes two times of CLOCK_MONOTONIC into every chunk, where logprobs or text
would be: its own time, and, always earlier, the arrival of the request. All processes share the
clock, so each chunk says by itself how long it was under way.
"""

import asyncio
import gc
import itertools
import random
import re
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self, cast
from urllib.parse import urlsplit

import msgspec

from bench.common.processes import BenchProcess, python
from bench.common.stats import quantiles
from rose.errors import UnavailableError

STREAMS = (1, 10, 100, 500, 1000, 2000)
# From this many streams on each goes at its full pace; fewer go faster, or there were few turns.
PACED_STREAMS = 200
# Stamps are seconds since boot; anything below is a token's real logprob, zero here.
SMALLEST_STAMP_S = 1.0
ERRORS_KEPT = 5
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
# Tokens of the smallest model that is measured.
VOCABULARY = 90
CONNECT_AT_ONCE = 50
LAST_CHUNK = b"0\r\n\r\n"
HUNG_UP = 0
# Kept of an answer whose pieces go to a callback: its end mark, and what an error says.
_TAIL_BYTES = 200
# Name of the model at stand-in and real engines.
MODEL = "policy"
_LOGPROB = re.compile(rb"-([\d.]+)")
_LINE_LOGPROBS = re.compile(rb'"logprobs":\[([^\]]*)\]')
_EVENT_LOGPROB = re.compile(rb'"logprob":-([\d.]+)')
_TEXT = re.compile(rb'"text":"([\d.]+) ([\d.]+)')
# Gateways look at logprobs: a time is a small negative number there.
_LOGPROB_S = 1e6
# The context of a new connection, and the name that its server has to prove.
Tls = Callable[[], tuple[ssl.SSLContext, str]]


class HttpAnswer(NamedTuple):
    """`status` is HUNG_UP where the connection ended before the answer did, whoever ended it."""

    status: int
    body: bytes


def request_of(path: str, body: bytes, method: str = "POST", more_head: bytes = b"") -> bytes:
    """Return the bytes of one request; `more_head`: further lines of its head, with their ends."""
    return (
        b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%b\r\n%b"
        % (method.encode(), path.encode(), len(body), more_head, body)
    )


class HttpCaller:
    """One connection to `url`, opened when it is needed and anew after it was closed.

    on_body: called with each piece of an answer's body, chunk marks included, and the time of its
    arrival; the answer then keeps only its end.
    """

    def __init__(
        self,
        url: str,
        on_body: Callable[[bytes, float], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._tls = tls if address.scheme == "https" else None
        self.on_body = on_body
        self._transport: asyncio.Transport | None = None
        self._pending: asyncio.Future[HttpAnswer] | None = None
        self._body = self._hang_up_at = b""
        self._status, self._missing = 0, -1

    async def open(self) -> None:
        """Connect, unless it is connected. Raises OSError."""
        if self._transport is None:
            context, name = self._tls() if self._tls else (None, None)
            await asyncio.get_running_loop().create_connection(
                lambda: _Line(self), self._host, self._port, ssl=context, server_hostname=name
            )

    async def ask(
        self, request: bytes, *, hang_up_after_s: float | None = None, hang_up_at: bytes = b""
    ) -> HttpAnswer:
        """Send a request and return its answer.

        The connection is closed after `hang_up_after_s` seconds, or at `hang_up_at` in an answer.
        """
        await self.open()
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        pending: asyncio.Future[HttpAnswer] = loop.create_future()
        self._pending = pending
        self._body, self._hang_up_at = b"", hang_up_at
        self._status, self._missing = 0, -1
        self._transport.write(request)
        timer = None
        if hang_up_after_s is not None:
            timer = loop.call_later(hang_up_after_s, self.hang_up)
        answer = await pending
        if timer is not None:
            timer.cancel()
        return answer

    async def post(self, path: str, body: bytes, **how: Any) -> HttpAnswer:  # noqa: ANN401 - as ask's
        """Post a JSON body, as `ask`."""
        return await self.ask(request_of(path, body), **how)

    async def get(self, path: str) -> HttpAnswer:
        """Get a path, as `ask`."""
        return await self.ask(request_of(path, b"", "GET"))

    def hang_up(self) -> None:
        """Close the connection, whatever it still waits for."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._answer(HUNG_UP)

    def opened(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def lost(self, transport: asyncio.Transport) -> None:
        """Take note that a connection has ended; it may be an earlier one."""
        if transport is self._transport:
            self.hang_up()

    def received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._pending is None:
            return
        if not self._status:
            head, mark, data = (self._body + data).partition(b"\r\n\r\n")
            if not mark:
                self._body = head
                return
            self._body = b""
            _, counted, rest = head.lower().partition(b"content-length: ")
            self._missing = int(rest.split(b"\r\n", 1)[0]) if counted else -1
            self._status = int(head.split(b" ", 2)[1])
        chunked = self._missing < 0
        self._body += data
        if not chunked:
            self._missing = max(0, self._missing - len(data))
        over = self._body.endswith(LAST_CHUNK) if chunked else self._missing == 0
        if self.on_body is not None:
            if data:
                self.on_body(data, now_s)
            self._body = self._body[-_TAIL_BYTES:]
        if self._hang_up_at and self._hang_up_at in self._body:
            self.hang_up()
        elif over:
            self._answer(self._status)

    def _answer(self, status: int) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done():
            pending.set_result(HttpAnswer(status, self._body))


class _Line(asyncio.Protocol):
    """One connection of a caller."""

    def __init__(self, caller: HttpCaller) -> None:
        self._caller = caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._caller.opened(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._caller.lost(self._transport)
        del self._transport

    def data_received(self, data: bytes) -> None:
        self._caller.received(data)


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


def _tokens_body(request_id: str, prompt: Sequence[int], budget: int) -> dict[str, object]:
    sampling = {"temperature": 1.0, "max_tokens": budget, "logprobs": 1}
    return {"request_id": request_id, "token_ids": prompt, "sampling_params": sampling}


def _completion_body(_: str, prompt: Sequence[int], budget: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": budget, "stream": True}


def _of_lines(data: bytes) -> list[float]:
    found = _LINE_LOGPROBS.findall(data)
    return [_LOGPROB_S * float(number) for each in found for number in _LOGPROB.findall(each)]


def _of_events(data: bytes) -> list[float]:
    return [_LOGPROB_S * float(number) for number in _EVENT_LOGPROB.findall(data)]


def _of_text(data: bytes) -> list[float]:
    return [float(number) for found in _TEXT.findall(data) for number in found]


REPLICA = Wire(
    "replica lines",
    "/rose/v1/generate",
    lambda request_id, prompt, budget: {
        "request_id": request_id,
        "token_ids": prompt,
        "sampling": {"temperature": 1.0, "max_tokens": budget},
    },
    _of_lines,
)
TOKENS = Wire("tokens, whole", "/inference/v1/generate", _tokens_body, _of_events, whole=True)
TOKEN_STREAM = Wire(
    "tokens",
    "/inference/v1/generate",
    lambda *asked: _tokens_body(*asked) | {"stream": True},
    _of_events,
)
COMPLETIONS = Wire("completions", "/v1/completions", _completion_body, _of_text)
SGLANG = Wire(
    "generate",
    "/generate",
    lambda request_id, prompt, budget: {
        "rid": request_id,
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": budget},
        "stream": True,
    },
    _of_text,
)
# A trainer asks an engine directly as the gateway always asks it.
REAL_TEXT = replace(
    COMPLETIONS,
    name="completions, real",
    body=lambda *asked: _completion_body(*asked) | {"logprobs": 0, "return_token_ids": True},
    real_chunk=b'"text":"',
)
REAL_TOKENS = replace(TOKEN_STREAM, name="tokens, real", real_chunk=b'"token_ids":[')
_ALL = (REPLICA, TOKENS, TOKEN_STREAM, COMPLETIONS, SGLANG, REAL_TEXT, REAL_TOKENS)
WIRES = {wire.name: wire for wire in _ALL}


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """A turn has `chunks` chunks of `chunk_tokens` tokens, `gap_s` apart, the first after
    `first_s`; its prompt has `prompt_tokens`. Turns begin for `seconds`, after a ramp of one turn.
    """

    streams: int
    seconds: float = 8.0
    prompt_tokens: int = 128
    chunks: int = 16
    chunk_tokens: int = 8
    first_s: float = 0.02
    full_gap_s: float = 0.5

    @property
    def gap_s(self) -> float:
        return self.full_gap_s * min(1.0, self.streams / PACED_STREAMS)

    @property
    def max_tokens(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def turn_s(self) -> float:
        """Seconds of a turn without any router."""
        return self.first_s + (self.chunks - 1) * self.gap_s

    def as_json(self) -> dict[str, object]:
        """Return all of it as a record."""
        return {**asdict(self), "gap_s": self.gap_s, "turn_s": self.turn_s}


@dataclass(slots=True)
class TurnTimes:
    """Times of one turn, in seconds.

    into_s: the request's way to the engine. chunks: (time of arrival, time under way) of each; of a
    real engine, whose chunks have no stamps, the time under way is the gap to the chunk before it.
    """

    sent_s: float
    into_s: float = 0.0
    chunks: list[tuple[float, float]] = field(default_factory=list)
    ended_s: float = 0.0
    error: str = ""


class Stream:
    """One connection and its turns, one after the other."""

    def __init__(self, url: str, wire: Wire, tls: Tls | None = None) -> None:
        self.caller = HttpCaller(url, self._body, tls)
        self._wire = wire
        self.times = TurnTimes(0.0)
        self._rest = b""

    async def turn(self, request: bytes, chunks: int = 0) -> TurnTimes:
        """Return the times of one turn, which must have so many `chunks`; 0 for any."""
        times = self.times = TurnTimes(time.monotonic())
        self._rest = b""
        status, tail = await self.caller.ask(request)
        times.ended_s = time.monotonic()
        self._note(self._rest, times.ended_s)
        count = len(times.chunks)
        if status == HUNG_UP:
            times.error = "connection lost"
        elif status != 200:
            times.error = f"{status}: {tail.decode('utf-8', 'replace')}"
        elif not count or (chunks and count != chunks and not self._wire.real_chunk):
            times.error = f"{count} chunks instead of {chunks}"
        return times

    def _body(self, data: bytes, now_s: float) -> None:
        lines, _, self._rest = (self._rest + data).rpartition(b"\n")
        if lines:
            self._note(lines, now_s)

    def _note(self, data: bytes, now_s: float) -> None:
        times, wire = self.times, self._wire
        if wire.real_chunk:
            for _ in range(data.count(wire.real_chunk)):
                last_s = times.chunks[-1][0] if times.chunks else times.sent_s
                times.chunks.append((now_s, now_s - last_s))
            return
        stamps = {stamp for stamp in wire.stamps(data) if stamp > SMALLEST_STAMP_S}
        if stamps:
            received_s = min(stamps)
            # A chunk of one token has one stamp alone: the first chunk has both.
            if not times.chunks:
                times.into_s = received_s - times.sent_s
            written = sorted(stamps - {received_s}) or [received_s]
            times.chunks += [(now_s, now_s - written_s) for written_s in written]


def figures(
    turns: Iterable[TurnTimes], wire: Wire, start_s: float, stop_s: float
) -> dict[str, Any]:
    """Return quantiles in seconds, and counts, of what happened between two times.

    first_s: a turn's way in and its first chunk's way out, of a whole answer its last chunk's.
    later_s: the way of any later chunk.
    """
    first: list[float] = []
    later: list[float] = []
    errors = []
    count = 0
    for turn in turns:
        heads, tails = turn.chunks[:1], turn.chunks[1:]
        if wire.whole:
            heads, tails = turn.chunks[-1:], []
        first += [turn.into_s + way_s for at_s, way_s in heads if start_s <= at_s <= stop_s]
        later += [way_s for at_s, way_s in tails if start_s <= at_s <= stop_s]
        if turn.error:
            errors.append(turn.error)
        elif turn.ended_s:
            count += start_s <= turn.ended_s <= stop_s
    return {
        "first_s": dict(zip(QUANTILES, quantiles(first, *QUANTILES.values()), strict=True)),
        "later_s": dict(zip(QUANTILES, quantiles(later, *QUANTILES.values()), strict=True)),
        "samples": len(first),
        "turns": count,
        "turns_per_s": count / (stop_s - start_s),
        "errors": len(errors),
        "errors_kept": errors[:ERRORS_KEPT],
    }


async def run(urls: Sequence[str], wire: Wire, load: StreamLoad, seed: int = 0) -> dict[str, Any]:
    """Return the figures of one cell: ramp up over one turn, measure for `load.seconds`."""
    dice = random.Random(seed)  # noqa: S311 - a load, not a secret
    numbers = itertools.count(seed * 10**7)
    streams = [Stream(urls[k % len(urls)], wire) for k in range(load.streams)]
    for first in range(0, load.streams, CONNECT_AT_ONCE):
        some = streams[first : first + CONNECT_AT_ONCE]
        await asyncio.gather(*(stream.caller.open() for stream in some))
    turns: list[TurnTimes] = []

    async def repeat(stream: Stream, session: str, offset_s: float) -> None:
        prompt = [dice.randrange(VOCABULARY) for _ in range(load.prompt_tokens)]
        await asyncio.sleep(offset_s)
        lost = False
        while not lost:
            name = f"bench-{next(numbers)}"
            request = wire.request(name, session, prompt, load.max_tokens)
            times = await stream.turn(request, load.chunks)
            turns.append(times)
            lost = times.error == "connection lost"

    tasks = [
        asyncio.create_task(repeat(stream, f"s{k}", dice.random() * load.turn_s))
        for k, stream in enumerate(streams)
    ]
    await asyncio.sleep(load.turn_s + 0.2)
    start_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(load.seconds)
    stop_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # A turn that goes on counts by the chunks that it has.
    turns += [stream.times for stream in streams if not stream.times.ended_s]
    for stream in streams:
        stream.caller.hang_up()
    found = figures(turns, wire, start_s, stop_s)
    return found | {"generator_busy": cpu_s / (stop_s - start_s)}


async def block(
    streams: Sequence[Stream], request: Callable[[], bytes], until_s: float, spread_s: float = 0.0
) -> list[TurnTimes]:
    """Return the turns that begin before `until_s`, one at least a stream, all of them ended.

    spread_s: time within which the streams begin. Raises UnavailableError for a turn that fails.
    """
    turns: list[TurnTimes] = []

    async def repeat(stream: Stream, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        again = True
        while again:
            times = await stream.turn(request())
            if times.error:
                raise UnavailableError(f"a turn failed: {times.error}")
            turns.append(times)
            again = time.monotonic() < until_s

    count = len(streams)
    tasks = [
        asyncio.create_task(repeat(stream, spread_s * number / count))
        for number, stream in enumerate(streams)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return turns


async def alternate(
    arms: Sequence[str], rounds: int, play: Callable[[str], Awaitable[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each arm's blocks, which are played by turns, back and forth."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            found[arm].append(await play(arm))
    return found


def added(
    above: Sequence[Mapping[str, Any]], below: Sequence[Mapping[str, Any]], name: str, digits: int
) -> float:
    """Return the median, over pairs of blocks, of a figure's difference."""
    pairs = zip(above, below, strict=True)
    return round(float(median(one[name] - other[name] for one, other in pairs)), digits)


class Generator(BenchProcess):
    """Process that runs cells of this load."""

    @classmethod
    def of(cls, log: Path, core: Sequence[int]) -> Self:
        return cls("generator", python("bench.load.streams"), log, core, piped=True)

    def cell(
        self, urls: Sequence[str], wire: str, load: StreamLoad, seed: int
    ) -> Mapping[str, Any]:
        cell = {"urls": urls, "wire": wire, "load": load, "seed": seed}
        result: dict[str, Any] = msgspec.json.decode(self.ask(msgspec.json.encode(cell)))
        return result


def main() -> None:
    # A collection in the middle of a cell would be measured; a cell leaves little behind.
    gc.disable()
    for text in sys.stdin:
        gc.collect()
        cell: dict[str, Any] = msgspec.json.decode(text)
        if not cell:
            return
        load = StreamLoad(**cell["load"])
        began = time.process_time()
        result = asyncio.run(run(cell["urls"], WIRES[cell["wire"]], load, cell["seed"]))
        result["generator_cpu_s"] = time.process_time() - began
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

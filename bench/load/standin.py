"""A stand-in for engines: answers at a fixed pace, computes nothing. One process, several ports.

`python -m bench.load.standin PORT…` speaks ROSE's replica lines and, as server-sent events, vLLM's
completions and SGLang's `/generate`. A port given as `sPORT` is a stock engine's: no replica lines.
Bare sockets: a web framework would cost more than the router that is measured.
"""

import asyncio
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self, cast

from bench.common.processes import BenchProcess, answers, python
from bench.load.caller import LAST_CHUNK
from bench.load.wires import as_logprob
from rose.errors import EngineStartError

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"transfer-encoding: *chunked", re.IGNORECASE)
_BUDGET = re.compile(rb'"max_(?:new_)?tokens": ?(\d+)')
STATE = (
    b'{"replica_id":"standin","role":"dedicated","policy_version":0,"proven":true,"admitting":true,'
    b'"epoch":0,"running":0,"waiting":0,"tokens_total":0,"kv_tokens":0,"warm":true}'
)
MODELS = b'{"object":"list","data":[{"id":"policy","object":"model","max_model_len":65536}]}'
VERSION = b'{"version":"0.32.0"}'
ANSWERS = {b"/rose/v1/state": STATE, b"/v1/models": MODELS, b"/version": VERSION}
JSON = "application/json"
DONE = "data: [DONE]\n\n"
STREAMS = (b"/rose/v1/generate", b"/rose/v1/generate_batch", b"/v1/completions", b"/generate")
LINES, BATCH, TEXT, SGLANG = STREAMS


class Pace:
    """Pace of all turns, until it is changed, and the turns so far."""

    def __init__(self, first_s: float, gap_s: float, chunk_tokens: int) -> None:
        self.first_s = first_s
        self.gap_s = gap_s
        self.chunk_tokens = chunk_tokens
        self.turns = 0
        self.left = 0


class StandInConnection(asyncio.Protocol):
    """One connection: requests one after the other, each answered or streamed."""

    def __init__(self, pace: Pace, stock: bool) -> None:
        self._pace = pace
        self._stock = stock
        self._rest = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """End the turn: its reader has gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._pace.left += 1

    def data_received(self, data: bytes) -> None:
        self._rest += data
        head, mark, body = self._rest.partition(b"\r\n\r\n")
        if not mark:
            return
        length = _LENGTH.search(head)
        needed = int(length.group(1)) if length else 0
        if _CHUNKED.search(head):
            # One number of the body alone is read: chunk sizes around it do no harm.
            needed = body.find(LAST_CHUNK) + len(LAST_CHUNK)
            if needed < len(LAST_CHUNK):
                return
        if len(body) < needed:
            return
        self._rest = body[needed:]
        self._answer(head.split(b" ", 2)[1].split(b"?")[0], body[:needed])

    def _answer(self, path: bytes, body: bytes) -> None:
        if self._stock and path.startswith(b"/rose/"):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        elif path in STREAMS:
            self._begin(body, path)
        else:
            answer = self._paced(path) or ANSWERS.get(path, b"{}")
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nContent-Length: {len(answer)}\r\n"
            self._transport.write(head.encode() + b"\r\n" + answer)

    def _paced(self, path: bytes) -> bytes:
        """`/standin/pace/FIRST/GAP/TOKENS` sets the pace of all turns to come."""
        if not path.startswith(b"/standin/pace/"):
            return b""
        first_s, gap_s, tokens = path.decode().rsplit("/", 3)[1:]
        pace = self._pace
        pace.first_s, pace.gap_s, pace.chunk_tokens = float(first_s), float(gap_s), int(tokens)
        return f'{{"turns":{pace.turns},"left":{pace.left}}}'.encode()

    def _begin(self, body: bytes, path: bytes) -> None:
        self._budgets = [int(each) for each in _BUDGET.findall(body)] or [16]
        self._made = 0
        self._due = max(self._budgets)
        self._path = path
        self._as_tokens = b'"return_token_ids":true' in body
        self._received_s = time.monotonic()
        self._pace.turns += len(self._budgets)
        kind = b"application/x-ndjson" if path in (LINES, BATCH) else b"text/event-stream"
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: "
        self._head = head + kind + b"\r\n\r\n"
        self._next_s = self._received_s + self._pace.first_s
        self._timer = self._loop().call_at(self._next_s, self._chunk)

    def _chunk(self) -> None:
        count = min(self._due, self._pace.chunk_tokens)
        self._due -= count
        piece = self._of_all(count) if self._path == BATCH else self._piece(count)
        self._made += count
        data = self._head + f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
        self._head = b""
        if self._due:
            self._next_s += self._pace.gap_s
            self._timer = self._loop().call_at(self._next_s, self._chunk)
        else:
            self._timer = None
            data += b"0\r\n\r\n"
        self._transport.write(data)

    def _of_all(self, count: int) -> bytes:
        """Return lines of a batch's turns, those that end among them."""
        parts = []
        for place, budget in enumerate(self._budgets):
            mine = min(count, budget - self._made)
            if mine <= 0:
                continue
            given = ",".join([as_logprob(time.monotonic()), *["0"] * mine][:mine])
            tokens = ",".join(["7"] * mine)
            line = f'{{"token_ids":[{tokens}],"logprobs":[{given}],"version":0}}'
            parts.append(f"[{place},{line}]\n")
            if budget <= self._made + count:
                parts.append(f'[{place},{{"finish_reason":"length"}}]\n')
        return "".join(parts).encode()

    def _piece(self, count: int) -> bytes:
        now, received = f"{time.monotonic():.6f}", f"{self._received_s:.6f}"
        logprobs = [as_logprob(time.monotonic()), as_logprob(self._received_s), *["0"] * count]
        logprobs = logprobs[:count]
        tokens = ",".join(["7"] * count)
        reason = "null" if self._due else '"length"'
        if self._path == LINES:
            line = f'{{"token_ids":[{tokens}],"logprobs":[{",".join(logprobs)}],"version":0}}\n'
            return (line + ("" if self._due else '{"finish_reason":"length"}\n')).encode()
        if self._path == TEXT:
            values = ",".join(logprobs)
            both = f'"token_ids":[{tokens}],"logprobs":{{"token_logprobs":[{values}]}},'
            choice = f'"index":0,"text":"{now} {received}",{both if self._as_tokens else ""}'
            choice += f'"finish_reason":{reason}'
            event = f'"object":"text_completion","model":"policy","choices":[{{{choice}}}]'
        else:
            event = f'"text":"{now} {received}","meta_info":{{"finish_reason":{reason}}}'
        return f"data: {{{event}}}\n\n{'' if self._due else DONE}".encode()

    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()


class StandInEngine(BenchProcess):
    """Process of stand-in engines. Half of the ports are ROSE replicas, half stock engines."""

    urls: Sequence[str] = ()
    stock_urls: Sequence[str] = ()

    @classmethod
    def of(cls, ports: Sequence[int], log: Path, core: Sequence[int]) -> Self:
        """Return the process, started and serving. Raises EngineStartError."""
        half = (len(ports) + 1) // 2
        replicas, stock = ports[:half], ports[half:]
        names = [*map(str, replicas), *(f"s{port}" for port in stock)]
        argv = python("bench.load.standin", *names)
        engine = cls("stand-in engine", argv, log, core, piped=True).start()
        engine.urls = [f"http://127.0.0.1:{port}" for port in replicas]
        engine.stock_urls = [f"http://127.0.0.1:{port}" for port in stock]
        engine.read()
        return engine

    def pace(self, first_s: float, gap_s: float, chunk_tokens: int) -> None:
        """Set the pace of all turns from now on."""
        url = f"{self.urls[0]}/standin/pace/{first_s}/{gap_s}/{chunk_tokens}"
        if not answers(url):
            raise EngineStartError("the stand-in engine does not take its pace")


async def _serve(ports: list[str]) -> None:
    loop, pace = asyncio.get_running_loop(), Pace(0.02, 0.01, 8)
    for port in ports:
        stock = port.startswith("s")
        make = partial(StandInConnection, pace, stock)
        await loop.create_server(make, "127.0.0.1", int(port.lstrip("s")), backlog=4096)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1:]))

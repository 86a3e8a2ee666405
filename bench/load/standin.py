"""A stand-in for engines: answers at a fixed pace, computes nothing. One process, several ports.

`python -m bench.load.standin PORT…` speaks ROSE's replica lines and, as server-sent events, vLLM's
completions and SGLang's `/generate`. A port given as `sPORT` is a stock engine's: no replica lines;
turns at `fPORT` fail as their request ids say: `WAY-NUMBER`.
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

import uvloop

from bench.common.processes import BenchProcess, answers, python
from bench.load.streams import LAST_CHUNK, as_logprob
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
# Marks of a port's kind.
STOCK, FAULTY = "s", "f"
DONE = "data: [DONE]\n\n"
STREAMS = (b"/rose/v1/generate", b"/rose/v1/generate_batch", b"/v1/completions", b"/generate")
LINES, BATCH, TEXT, SGLANG = STREAMS

# The gateway's name of an attempt is the turn's id, `.copyN` for a second copy, and its number.
_ATTEMPT = re.compile(rb'"request_id":"([a-z_]+)-[^"]*\.(\d+)"')
# Refused by every replica alike.
STATUSES = {b"refused": 400, b"failing": 500}
# The first attempt meets this; the next one, on another replica, goes well.
FIRST_STATUSES = {b"draining": 503, b"faulty": 500}
REVOKED, DIES, SILENT, GARBAGE = b"revoked", b"dies", b"silent", b"garbage"
AFTER_CHUNKS = 2


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


class FaultyConnection(StandInConnection):
    """One connection; a turn's id decides its end."""

    def _begin(self, body: bytes, path: bytes) -> None:
        named = _ATTEMPT.search(body)
        way, number = (named.group(1), int(named.group(2))) if named else (b"", 0)
        status = STATUSES.get(way) or (FIRST_STATUSES.get(way) if number == 1 else None)
        if status is not None:
            self._transport.write(b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\n{}" % status)
            return
        # A turn that is revoked again and again is whole on its fourth replica.
        again = b"revoked_again"
        self._fault = REVOKED if way == again and number < 4 else way if number == 1 else b""
        self._chunks = 0
        super()._begin(body, path)

    def _chunk(self) -> None:
        self._chunks += 1
        if self._chunks <= AFTER_CHUNKS or self._fault not in (REVOKED, DIES, SILENT, GARBAGE):
            super()._chunk()
            return
        self._timer = None
        if self._fault == REVOKED:
            line, places = b'{"finish_reason":"revoked"}', range(len(self._budgets))
            batch = b"".join(b"[%d,%b]\n" % (place, line) for place in places)
            self._write_line(batch if self._path == BATCH else line + b"\n", LAST_CHUNK)
        elif self._fault == GARBAGE:
            self._write_line(b'{"token_ids": [1, \n')
        elif self._fault == DIES:
            self._transport.abort()

    def _write_line(self, line: bytes, end: bytes = b"") -> None:
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(line), line, end))


class StandInEngine(BenchProcess):
    """Process of stand-in engines. Half of the ports are ROSE replicas, half stock engines."""

    urls: Sequence[str] = ()
    stock_urls: Sequence[str] = ()

    @classmethod
    def of(cls, ports: Sequence[int], log: Path, core: Sequence[int]) -> Self:
        """Return the process, started and serving. Raises EngineStartError."""
        half = (len(ports) + 1) // 2
        replicas, stock = ports[:half], ports[half:]
        names = [*map(str, replicas), *(f"{STOCK}{port}" for port in stock)]
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


async def listen(
    pace: Pace, port: int = 0, *, stock: bool = False, faulty: bool = False
) -> asyncio.Server:
    """Serve in this process; port 0 for any."""
    make = partial(FaultyConnection if faulty else StandInConnection, pace, stock)
    loop = asyncio.get_running_loop()
    return await loop.create_server(make, "127.0.0.1", port, backlog=4096)


async def _serve(ports: list[str]) -> None:
    pace = Pace(0.002, 0.002, 4) if FAULTY in "".join(ports) else Pace(0.02, 0.01, 8)
    for port in ports:
        number = int(port.strip(STOCK + FAULTY))
        await listen(pace, number, stock=STOCK in port, faulty=FAULTY in port)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    (uvloop if FAULTY in "".join(sys.argv[1:]) else asyncio).run(_serve(sys.argv[1:]))

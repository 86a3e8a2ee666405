"""The load generator, a process of its own: many streams over bare sockets, and every time noted.

stdin, one JSON object a line: {"urls", "wire", "streams", "seconds", …as Load…}; stdout, one line
each: what came of it. `{}` ends it.
"""

import asyncio
import gc
import itertools
import random
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np

from bench.gateway.arms import WIRES, Wire

STREAMS = (1, 10, 100, 500, 1000, 2000)
# From this many streams on each goes at its full pace; fewer go faster, or there were few turns.
PACED_STREAMS = 200


@dataclass(frozen=True, slots=True)
class Load:
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
        """Seconds between a turn's chunks."""
        return self.full_gap_s * min(1.0, self.streams / PACED_STREAMS)

    @property
    def max_tokens(self) -> int:
        """Tokens of a turn."""
        return self.chunks * self.chunk_tokens

    @property
    def turn_s(self) -> float:
        """What a turn takes without any router."""
        return self.first_s + (self.chunks - 1) * self.gap_s

    def as_json(self) -> dict[str, object]:
        """For the record."""
        return {**asdict(self), "gap_s": self.gap_s, "turn_s": self.turn_s}


ERRORS_KEPT = 5
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


class Times:
    """Times of turns and tokens in seconds; counted only between `start` and `stop`."""

    def __init__(self) -> None:
        self._on = False
        self._began_s = self._seconds = 0.0
        self._cpu = time.process_time()
        self._first, self._later = array("d"), array("d")
        self._turns = self._errors = 0
        self._said: list[str] = []

    @property
    def turns(self) -> int:
        """Turns that ended as they should."""
        return self._turns

    @turns.setter
    def turns(self, value: int) -> None:
        if self._on:
            self._turns = value

    def start(self) -> None:
        """From here on it counts."""
        self._on, self._began_s, self._cpu = True, time.monotonic(), time.process_time()

    def stop(self) -> None:
        """It counts no more."""
        self._on = False
        self._seconds = time.monotonic() - self._began_s
        self._cpu = time.process_time() - self._cpu

    def first(self, under_way_s: float) -> None:
        """A turn's first chunk: its request's way to the engine and the chunk's way back."""
        if self._on:
            self._first.append(under_way_s)

    def later(self, under_way_s: float) -> None:
        """The way of any later chunk."""
        if self._on:
            self._later.append(under_way_s)

    def error(self, said: str) -> None:
        """A turn that did not end as it should, whenever it was."""
        self._errors += 1
        if len(self._said) < ERRORS_KEPT:
            self._said.append(said)

    def result(self) -> dict[str, object]:
        """Quantiles in seconds, counts, and how busy this process was."""
        return {
            "first_s": _quantiles(self._first),
            "later_s": _quantiles(self._later),
            "samples": len(self._first),
            "turns": self._turns,
            "turns_per_s": self._turns / self._seconds if self._seconds else 0.0,
            "errors": self._errors,
            "said": self._said,
            "generator_busy": self._cpu / self._seconds if self._seconds else 0.0,
        }


def _quantiles(values: "array[float]") -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(QUANTILES)
    found = np.quantile(np.frombuffer(values), [*QUANTILES.values()])
    return {name: float(value) for name, value in zip(QUANTILES, found, strict=True)}


# Stamps are seconds since boot; anything below is a token's real logprob, zero here.
SMALLEST_STAMP_S = 1.0
GRACE_S = 10.0
# Of the smallest model that is measured.
VOCABULARY = 90
CONNECT_AT_ONCE = 50


class Stream(asyncio.Protocol):
    """One connection and its turns."""

    def __init__(
        self, wire: Wire, load: Load, times: Times, ids: Iterator[int], session: str
    ) -> None:
        self._wire, self._load, self._times = wire, load, times
        self._ids, self._session = ids, session
        self._prompt = [random.randrange(VOCABULARY) for _ in range(load.prompt_tokens)]  # noqa: S311
        self._rest = b""
        self.running = False
        self.stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """A connection that ends in mid-turn is an error."""
        if self.running:
            self.running, self.stopped = False, True
            self._times.error(f"connection lost: {error}")

    def begin(self) -> None:
        """Send the next turn."""
        if self.stopped or self._transport.is_closing():
            return
        name = f"bench-{next(self._ids)}"
        request = self._wire.request(name, self._session, self._prompt, self._load.max_tokens)
        self._rest, self._headers = b"", b""
        self._chunks = 0
        self._left: int | None = None
        self.running = True
        self._sent_s = self._last_s = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Note when what came."""
        now_s = time.monotonic()
        if not self.running:
            return
        if not self._headers:
            head, mark, data = (self._rest + data).partition(b"\r\n\r\n")
            if not mark:
                self._rest = head
                return
            self._headers, self._rest = head.lower(), b""
            self._left = _content_length(self._headers)
        if self._left is not None:
            self._left -= len(data)
        ended = self._left <= 0 if self._left is not None else data.endswith(b"0\r\n\r\n")
        lines, mark, self._rest = (self._rest + data).rpartition(b"\n")
        if lines or ended:
            self._note(lines + (self._rest if ended else b""), now_s)
        if ended:
            self._finish(lines)

    def _note(self, data: bytes, now_s: float) -> None:
        if self._wire.real_chunk:
            self._note_arrival(data.count(self._wire.real_chunk), now_s)
            return
        stamps = {stamp for stamp in self._wire.stamps(data) if stamp > SMALLEST_STAMP_S}
        if not stamps:
            return
        received_s = min(stamps)
        written = sorted(stamps - {received_s}) or [received_s]
        if self._wire.whole:
            self._times.first(received_s - self._sent_s + now_s - written[-1])
            self._chunks = len(written)
            return
        for written_s in written:
            under_way_s = now_s - written_s
            if self._chunks:
                self._times.later(under_way_s)
            else:
                self._times.first(received_s - self._sent_s + under_way_s)
            self._chunks += 1

    def _note_arrival(self, chunks: int, now_s: float) -> None:
        """Of a real engine: time to the first token, then the gaps between chunks."""
        if chunks:
            passed_s = now_s - self._last_s
            (self._times.later if self._chunks else self._times.first)(passed_s)
            self._last_s = now_s
            self._chunks += chunks

    def _finish(self, tail: bytes) -> None:
        self.running = False
        if not self._headers.startswith(b"http/1.1 200"):
            self._times.error((self._headers[9:40] + tail[-200:]).decode("utf-8", "replace"))
        elif not self._whole():
            self._times.error(f"{self._chunks} chunks instead of {self._load.chunks}")
        else:
            self._times.turns += 1
        asyncio.get_running_loop().call_soon(self.begin)

    def _whole(self) -> bool:
        if self._wire.real_chunk:
            return self._chunks > 0
        return self._chunks == self._load.chunks

    def close(self) -> None:
        """The end of the run: what still goes on is not counted."""
        self.running, self.stopped = False, True
        self._transport.abort()


def _content_length(headers: bytes) -> int | None:
    _, mark, rest = headers.partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0]) if mark else None


async def run(urls: Sequence[str], wire: Wire, load: Load, seed: int = 0) -> Times:
    """One cell: ramp up over one turn, measure for `load.seconds`."""
    random.seed(seed)
    times, ids, loop = Times(), itertools.count(seed * 10**7), asyncio.get_running_loop()
    streams: list[Stream] = []
    for first in range(0, load.streams, CONNECT_AT_ONCE):
        some = range(first, min(first + CONNECT_AT_ONCE, load.streams))
        made = [
            _connect(urls[k % len(urls)], Stream(wire, load, times, ids, f"s{k}")) for k in some
        ]
        streams += await asyncio.gather(*made)
    for stream in streams:
        loop.call_later(random.random() * load.turn_s, stream.begin)  # noqa: S311
    await asyncio.sleep(load.turn_s + 0.2)
    times.start()
    await asyncio.sleep(load.seconds)
    times.stop()
    for stream in streams:
        stream.close()
    return times


async def _connect(url: str, stream: Stream) -> Stream:
    address = urlsplit(url)
    await asyncio.wait_for(
        asyncio.get_running_loop().create_connection(
            lambda: stream, address.hostname or "", address.port or 80
        ),
        GRACE_S,
    )
    return stream


def main() -> None:
    """Serve cells until told to end."""
    # A collection in the middle of a cell would be measured; a cell leaves little behind.
    gc.disable()
    for text in sys.stdin:
        gc.collect()
        cell: dict[str, Any] = msgspec.json.decode(text)
        if not cell:
            return
        load = Load(**cell["load"])
        began = time.process_time()
        times = asyncio.run(run(cell["urls"], WIRES[cell["wire"]], load, cell["seed"]))
        result = times.result()
        result["generator_cpu_s"] = time.process_time() - began
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

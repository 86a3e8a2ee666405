"""Closed-loop load: streams of turns over bare sockets, and the times of every turn.

`python -m bench.load.streams` serves it in a process of its own. stdin, one JSON object a line:
{"urls", "wire", "load", "seed"}; stdout, one line each: `figures` of that cell. `{}` ends it.
"""

import asyncio
import gc
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from bench.common.processes import BenchProcess, python
from bench.common.stats import quantiles
from bench.load.caller import HUNG_UP, HttpCaller, Tls
from bench.load.wires import WIRES, Wire

STREAMS = (1, 10, 100, 500, 1000, 2000)
# From this many streams on each goes at its full pace; fewer go faster, or there were few turns.
PACED_STREAMS = 200


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


# Stamps are seconds since boot; anything below is a token's real logprob, zero here.
SMALLEST_STAMP_S = 1.0


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


ERRORS_KEPT = 5
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


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


# Tokens of the smallest model that is measured.
VOCABULARY = 90
CONNECT_AT_ONCE = 50


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

    spread_s: time within which the streams begin. Raises OSError for a turn that fails.
    """
    turns: list[TurnTimes] = []

    async def repeat(stream: Stream, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        again = True
        while again:
            times = await stream.turn(request())
            if times.error:
                raise OSError(f"a turn failed: {times.error}")
            turns.append(times)
            again = time.monotonic() < until_s

    count = len(streams)
    async with asyncio.TaskGroup() as group:
        for number, stream in enumerate(streams):
            group.create_task(repeat(stream, spread_s * number / count))
    return turns


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

"""What tracing costs a gateway: processor time of a turn, with a trace, and with spans of it.

    python -m bench.operators.tracing [--rounds N] [--seconds S] [--out FILE]

Prints one JSON object. Gateways before a stand-in engine that answers at once, all with an event
log, and short turns one after the other on a few streams: the most turns a second, so the most
traces. The arms are the same turn without a trace, with one that is not recorded, with one that is
(the event log gets `turn_traced`), and, where OpenTelemetry is installed, through a gateway that
sends spans to a collector, a second stand-in. Blocks alternate; added is the median over rounds of
the difference to the arm without.
"""

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from bench.common.output import machine_line, put
from bench.gateway.arms import TOKEN_STREAM, rose_command
from bench.gateway.processes import MeasuredProcess, StandInEngine, cores
from rose.addresses import free_ports
from rose.errors import UnavailableError
from rose.gateway.backends.http_pool import Upstream

STREAMS: Final = 8
PIECES: Final = 2
PIECE_TOKENS: Final = 8
PROMPT: Final = list(range(1_000, 1_128))
WITHOUT, UNRECORDED, RECORDED, SPANS = "no trace", "a trace", "a recorded trace", "spans"


class Block(msgspec.Struct, frozen=True):
    """One block of one arm."""

    turns: int
    turns_a_s: float
    cpu_us: float
    p50_ms: float


class Arm(msgspec.Struct, frozen=True):
    """All blocks of one arm; added: to the arm without a trace, of the gateway's processor."""

    name: str
    cpu_us: float
    added_us: float
    added_share: float
    blocks: list[Block]


class _Answer:
    """Receiver of one turn's answer."""

    __slots__ = ("over",)

    def __init__(self, over: "asyncio.Future[None]") -> None:
        self.over = over

    def status(self, code: int) -> None:
        if code != 200 and not self.over.done():
            self.over.set_exception(UnavailableError(f"a turn was answered with {code}"))

    def body(self, data: bytes) -> None:
        """It is not looked at."""

    def ended(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


def trace_of(arm: str) -> bytes:
    """The line of a request's head; each turn is of a trace of its own."""
    if arm == WITHOUT:
        return b""
    flag = "00" if arm == UNRECORDED else "01"
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return f"traceparent: 00-{trace}-{span}-{flag}\r\n".encode()


class Bench:
    """All processes, placed; `block` measures one arm for a while."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Raises EngineStartError when a process does not start."""
        placed = cores()
        one, other, plain, spanned, collector, unused = free_ports(6)
        engine = StandInEngine((one, other), folder / "engine.log", placed["engine"])
        stack.callback(engine.end)
        engine.pace(0.0, 0.0, PIECE_TOKENS)
        self.arms = [WITHOUT, UNRECORDED, RECORDED]
        gateways: dict[int, dict[str, str]] = {plain: {}}
        if find_spec("opentelemetry"):
            sink = StandInEngine((collector, unused), folder / "collector.log", placed["engine"])
            stack.callback(sink.end)
            gateways[spanned] = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.urls[0]}
            self.arms.append(SPANS)
        self._gateways: dict[str, tuple[MeasuredProcess, str]] = {}
        for port, env in gateways.items():
            logs = folder / f"logs-{port}"
            words = [*rose_command(port, engine.urls, 64), f"--log-dir={logs}"]
            log = folder / f"gateway-{port}.log"
            process = MeasuredProcess("gateway", words, log, placed["router"], env)
            stack.callback(process.end)
            url = f"http://127.0.0.1:{port}"
            process.wait_answers(f"{url}/health", len(engine.urls))
            for arm in [SPANS] if env else self.arms[:3]:
                self._gateways[arm] = process, url + TOKEN_STREAM.path
        os.sched_setaffinity(0, placed["generator"])

    async def block(self, arm: str, seconds: float) -> Block:
        """Turns of one arm, one after the other on each stream."""
        process, _ = self._gateways[arm]
        upstream = Upstream()
        began_s, before_s = time.monotonic(), process.used().ran_s
        try:
            turns = [self._stream(upstream, arm, began_s + seconds) for _ in range(STREAMS)]
            took_s = [each for stream in await asyncio.gather(*turns) for each in stream]
        finally:
            upstream.close()
        spent_s, ran_s = time.monotonic() - began_s, process.used().ran_s - before_s
        return Block(
            len(took_s),
            round(len(took_s) / spent_s, 1),
            round(1e6 * ran_s / len(took_s), 1),
            round(1e3 * median(took_s), 3),
        )

    async def _stream(self, upstream: Upstream, arm: str, until_s: float) -> list[float]:
        """Seconds of each turn."""
        _, url = self._gateways[arm]
        took_s: list[float] = []
        loop = asyncio.get_running_loop()
        while time.monotonic() < until_s:
            body = TOKEN_STREAM.body(secrets.token_hex(8), PROMPT, PIECES * PIECE_TOKENS)
            began_s, answer = time.monotonic(), _Answer(loop.create_future())
            await upstream.post(url, body, answer, trace_of(arm))
            await answer.over
            took_s.append(time.monotonic() - began_s)
        return took_s


async def measure(rounds: int, seconds: float) -> list[Arm]:
    """All arms. Raises EngineStartError."""
    with tempfile.TemporaryDirectory(prefix="rose-tracing-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), stack)
        found: dict[str, list[Block]] = {arm: [] for arm in bench.arms}
        for arm in bench.arms:
            await bench.block(arm, seconds / 4)
        for number in range(rounds):
            for arm in bench.arms if number % 2 == 0 else reversed(bench.arms):
                found[arm].append(await bench.block(arm, seconds))
    return [_arm(name, blocks, found[WITHOUT]) for name, blocks in found.items()]


def _arm(name: str, blocks: list[Block], without: Sequence[Block]) -> Arm:
    added_us = median(a.cpu_us - b.cpu_us for a, b in zip(blocks, without, strict=True))
    base_us = median(block.cpu_us for block in without)
    return Arm(
        name,
        round(median(block.cpu_us for block in blocks), 1),
        round(added_us, 1),
        round(added_us / base_us, 4),
        blocks,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each block")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    arms = asyncio.run(measure(args.rounds, args.seconds))
    found = {
        "machine": machine_line(),
        "streams": STREAMS,
        "arms": [msgspec.to_builtins(arm) for arm in arms],
    }
    put(found, args.out, indent=1, shown=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

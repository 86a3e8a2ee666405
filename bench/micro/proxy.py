"""What a node's proxy adds to a turn, and whether a guard beside it notices its streams.

    python -m bench.micro.proxy [--rounds N] [--seconds S] [--out FILE]

Prints one JSON object. A stand-in engine streams at a fixed pace and stamps each piece with the
time at which it wrote it, and with the time at which the turn reached it. Turns go to it straight,
over loopback, and through a proxy with mutual TLS, both by the gateway's own connections; blocks of
the two alternate, straight, proxied, proxied, straight. Added is the difference of medians of two
blocks side by side: of a turn on its way in, and of each piece on its way out.

Generator and engine share one core, the proxy has another with a thread of a further process that
wakes 50 times a second, as a guard does: how late it wakes is its gap. Exit code 1 when more than
0.3 ms is added at the median of up to 64 streams, or the guard's gaps grow by more than 1 ms at
2,000.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import aiohttp
import msgspec
import numpy as np
import uvloop

from bench.common.output import machine_line, put
from bench.gateway.arms import REPLICA
from bench.gateway.processes import cores, used
from rose.addresses import free_ports
from rose.errors import EngineStartError, UnavailableError
from rose.gateway.backends.http_pool import ClusterTls, Upstream
from rose.process.http_port import raise_descriptor_limit
from rose.security.certificates import CertificateFiles
from rose.security.development_ca import DevelopmentCa
from rose.security.roles import Role

MOST_ADDED_MS: Final = 0.3
MOST_GAP_MS: Final = 1.0
# Up to so many streams the proxy has a processor's time to spare, and its median is its own.
FEW: Final = 64
# Streams, and seconds between two pieces of each.
LOADS: Final = ((1, 0.02), (64, 0.1), (2_000, 1.0))
PIECES: Final = 10
PIECE_TOKENS: Final = 8
PROMPT: Final = list(range(1_000, 1_512))
STRAIGHT, PROXIED = "straight", "proxied"
SPREAD_S: Final = 1.0
HANDSHAKES_A_S: Final = 100
TICK_S: Final = 0.02
START_S: Final = 30.0


class Half(msgspec.Struct, frozen=True):
    """One block of one arm, in milliseconds: a turn's way in, a piece's way out, a guard's gap."""

    turns: int
    pieces: int
    in_p50_ms: float
    in_p99_ms: float
    out_p50_ms: float
    out_p99_ms: float
    gap_p50_ms: float
    gap_p999_ms: float
    gap_max_ms: float
    proxy_core: float


class Load(msgspec.Struct, frozen=True):
    """All blocks of one number of streams, and what the proxy added by the median of pairs."""

    streams: int
    piece_every_s: float
    added_in_p50_ms: float
    added_out_p50_ms: float
    added_gap_p999_ms: float
    straight: list[Half]
    proxied: list[Half]

    @property
    def good(self) -> bool:
        """Whether it keeps to what is promised of so many streams."""
        if self.streams > FEW:
            return self.added_gap_p999_ms <= MOST_GAP_MS
        return max(self.added_in_p50_ms, self.added_out_p50_ms) <= MOST_ADDED_MS


class _Turn:
    """Receiver of one turn's answer: how long each piece was under way."""

    __slots__ = ("into_s", "out_s", "over", "sent_s")

    def __init__(self, over: "asyncio.Future[None]") -> None:
        self.sent_s = time.monotonic()
        self.into_s: float | None = None
        self.out_s: list[float] = []
        self.over = over

    def status(self, code: int) -> None:
        if code != 200 and not self.over.done():
            self.over.set_exception(UnavailableError(f"a turn was answered with {code}"))

    def body(self, data: bytes) -> None:
        now_s, stamps = time.monotonic(), REPLICA.stamps(data)
        if len(stamps) >= 2:
            self.out_s.append(now_s - stamps[0])
            if self.into_s is None:
                self.into_s = stamps[1] - self.sent_s

    def ended(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


class Generator:
    """Streams of one arm, each a turn after the other, on connections that are kept."""

    def __init__(self, url: str, files: CertificateFiles) -> None:
        self._url = url + REPLICA.path
        self._upstream = Upstream(ClusterTls(files))
        self.turns: list[_Turn] = []

    async def block(self, streams: int, until_s: float, spread_s: float) -> list[_Turn]:
        """Turns that begin before `until_s`, each stream's first one within `spread_s`."""
        self.turns = []
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._stream(spread_s * number / streams, until_s))
        return self.turns

    async def _stream(self, offset_s: float, until_s: float) -> None:
        await asyncio.sleep(offset_s)
        loop = asyncio.get_running_loop()
        number = 0
        while number == 0 or time.monotonic() < until_s:
            number += 1
            body = REPLICA.body("turn", PROMPT, PIECES * PIECE_TOKENS)
            turn = _Turn(loop.create_future())
            await self._upstream.post(self._url, body, turn)
            await turn.over
            self.turns.append(turn)

    def close(self) -> None:
        """Hang up."""
        self._upstream.close()


class Guardlike:
    """A process whose one thread wakes every TICK_S, as a guard's does."""

    def __init__(self, core: Sequence[int]) -> None:
        words = (sys.executable, "-m", "bench.micro.proxy", "--tick")
        self._process = subprocess.Popen(  # noqa: S603 - our own
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        os.sched_setaffinity(self._process.pid, core)
        self.gaps_s()

    def gaps_s(self) -> list[float]:
        """How late it woke each time since it was asked last."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def tick() -> int:
    """Wake every TICK_S; for each line of standard input say how late that was so far."""
    late: list[float] = []

    def wake() -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            time.sleep(TICK_S)
            late.append(time.monotonic() - due_s)

    threading.Thread(target=wake, daemon=True).start()
    for _ in sys.stdin:
        said, late[:] = json.dumps(late), []
        sys.stdout.write(said + "\n")
        sys.stdout.flush()
    return 0


class Bench:
    """All processes, placed; `run` measures one load."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """Raises EngineStartError when a process does not start."""
        port, proxy_port = free_ports(2)
        ca = DevelopmentCa.make(folder / "ca", "bench")
        node, gateway = (ca.issue(role, "n0") for role in (Role.NODE, Role.GATEWAY))
        files = CertificateFiles(ca.file, gateway.certificate, gateway.key)
        placed = cores()
        self._engine_url = f"http://127.0.0.1:{port}"
        engine = [sys.executable, "-m", "bench.gateway.standin_engine", str(port)]
        stack.enter_context(_running(engine, placed["engine"], b"ready"))
        words = [sys.executable, "-m", "rose.proxy.main", "--host=127.0.0.1"]
        words += [f"--port={proxy_port}", f"--replica={port}=engine", f"--ca={ca.file}"]
        words += [f"--certificate={node.certificate}", f"--key={node.key}"]
        self._proxy = stack.enter_context(_running(words, placed["router"], b"listening"))
        self._guard = Guardlike(placed["router"])
        stack.callback(self._guard.close)
        os.sched_setaffinity(0, placed["generator"])
        urls = {STRAIGHT: self._engine_url, PROXIED: f"https://127.0.0.1:{proxy_port}/engine"}
        self._arms = {name: Generator(url, files) for name, url in urls.items()}

    async def run(self, streams: int, gap_s: float, rounds: int, seconds: float) -> Load:
        """Measure one load, after a block of each arm that makes connections and counts nothing."""
        await self._pace(gap_s)
        for name in (STRAIGHT, PROXIED):
            # Handshakes are a millisecond or two each, on either side.
            await self._half(name, streams, 0.0, streams / HANDSHAKES_A_S)
        found: dict[str, list[Half]] = {STRAIGHT: [], PROXIED: []}
        for number in range(rounds):
            order = (STRAIGHT, PROXIED) if number % 2 == 0 else (PROXIED, STRAIGHT)
            for name in order:
                found[name].append(await self._half(name, streams, seconds))
        pairs = list(zip(found[STRAIGHT], found[PROXIED], strict=True))
        return Load(
            streams,
            gap_s,
            round(median(b.in_p50_ms - a.in_p50_ms for a, b in pairs), 3),
            round(median(b.out_p50_ms - a.out_p50_ms for a, b in pairs), 3),
            round(median(b.gap_p999_ms - a.gap_p999_ms for a, b in pairs), 3),
            found[STRAIGHT],
            found[PROXIED],
        )

    async def _half(
        self, name: str, streams: int, seconds: float, spread_s: float = SPREAD_S
    ) -> Half:
        self._guard.gaps_s()
        began_s, before_s = time.monotonic(), used(self._proxy).ran_s
        turns = await self._arms[name].block(streams, time.monotonic() + seconds, spread_s)
        ran_s = used(self._proxy).ran_s - before_s
        into = [turn.into_s for turn in turns if turn.into_s is not None]
        out = [each for turn in turns for each in turn.out_s]
        gaps = await asyncio.to_thread(self._guard.gaps_s)
        (in_p50, in_p99), (out_p50, out_p99) = _ms(into, 0.5, 0.99), _ms(out, 0.5, 0.99)
        gap_p50, gap_p999, gap_max = _ms(gaps, 0.5, 0.999, 1.0)
        return Half(
            turns=len(turns),
            pieces=len(out),
            in_p50_ms=in_p50,
            in_p99_ms=in_p99,
            out_p50_ms=out_p50,
            out_p99_ms=out_p99,
            gap_p50_ms=gap_p50,
            gap_p999_ms=gap_p999,
            gap_max_ms=gap_max,
            proxy_core=round(ran_s / (time.monotonic() - began_s), 3),
        )

    async def _pace(self, gap_s: float) -> None:
        path = f"/standin/pace/{gap_s}/{gap_s}/{PIECE_TOKENS}"
        async with aiohttp.ClientSession() as http, http.get(self._engine_url + path) as answer:
            await answer.read()

    def close(self) -> None:
        """Hang up."""
        for arm in self._arms.values():
            arm.close()


def _ms(values: Sequence[float], *quantiles: float) -> list[float]:
    found = np.quantile(values or [float("nan")], quantiles)
    return [round(1e3 * float(value), 3) for value in found]


@contextmanager
def _running(words: Sequence[str], core: Sequence[int], says: bytes) -> Iterator[int]:
    """Process id of one that has said that it serves."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE)  # noqa: S603 - our own
    try:
        os.sched_setaffinity(process.pid, core)
        assert process.stdout is not None
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        if says not in line:
            raise EngineStartError(f"{words[2]} does not start")
        yield process.pid
    finally:
        process.terminate()
        process.wait()


async def measure(rounds: int, seconds: float) -> list[Load]:
    """All loads. Raises EngineStartError."""
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory(prefix="rose-proxy-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), stack)
        try:
            return [await bench.run(*load, rounds, seconds) for load in LOADS]
        finally:
            bench.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether the promise holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="pairs of blocks")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each block")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tick", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tick:
        return tick()
    # As a gateway runs.
    loads = uvloop.run(measure(args.rounds, args.seconds))
    found = {
        "machine": machine_line(),
        "most_added_ms": MOST_ADDED_MS,
        "good": all(load.good for load in loads),
        "loads": [msgspec.to_builtins(load) for load in loads],
    }
    put(found, args.out, indent=1, shown=True)
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main())

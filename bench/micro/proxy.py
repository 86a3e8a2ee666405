"""Time that a node's proxy adds to a turn, and the delay of a guard beside its streams.

    python -m bench.micro.proxy [--rounds N] [--seconds S] [--out FILE]

Prints one JSON object. A stand-in engine streams at a fixed pace and stamps each piece with the
time at which it wrote it, and with the time at which the turn reached it. Turns go to it straight,
over loopback, and through a proxy with mutual TLS; blocks of the two alternate, straight, proxied,
proxied, straight. Added is the difference of medians of two blocks side by side: of a turn on its
way in, and of each piece on its way out.

Generator and engine share one core, the proxy has another with a thread of a further process that
wakes 50 times a second, as a guard does: how late it wakes is its gap. Exit code 1 when more than
0.3 ms is added at the median of up to 64 streams, or the guard's gaps grow by more than 1 ms at
2,000.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import uvloop

from bench.common.processes import BenchProcess, ProcessFleet, cores, python
from bench.common.report import machine, put, reported
from bench.common.stats import rounded
from bench.load.standin import StandInEngine
from bench.load.streams import REPLICA, Stream, block
from rose.addresses import free_ports
from rose.errors import EngineStartError
from rose.gateway.backends.http_pool import ClusterTls
from rose.process.http_port import raise_descriptor_limit
from rose.security.certificates import CertificateFiles
from rose.security.development_ca import DevelopmentCa
from rose.security.roles import Role

MOST_ADDED_MS: Final = 0.3
MOST_GAP_MS: Final = 1.0
# With few streams the proxy has a processor's time to spare, and its median is its own.
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


class ProxyBlock(msgspec.Struct, frozen=True):
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


class ProxyLoad(msgspec.Struct, frozen=True):
    """All blocks of one number of streams, and what the proxy added by the median of pairs."""

    streams: int
    piece_every_s: float
    added_in_p50_ms: float
    added_out_p50_ms: float
    added_gap_p999_ms: float
    straight: list[ProxyBlock]
    proxied: list[ProxyBlock]

    @property
    def good(self) -> bool:
        """True if it keeps the promise for so many streams."""
        if self.streams > FEW:
            return self.added_gap_p999_ms <= MOST_GAP_MS
        return max(self.added_in_p50_ms, self.added_out_p50_ms) <= MOST_ADDED_MS


def tick() -> int:
    """Wake every TICK_S, as a guard does; for each line of stdin write the delays so far."""
    late: list[float] = []

    def wake() -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            time.sleep(TICK_S)
            late.append(time.monotonic() - due_s)

    threading.Thread(target=wake, daemon=True).start()
    for _ in sys.stdin:
        delays, late[:] = json.dumps(late), []
        sys.stdout.write(delays + "\n")
        sys.stdout.flush()
    return 0


class ProxyBench(ProcessFleet):
    """All processes, placed; `load` measures one load. Context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises EngineStartError when a process does not start."""
        super().__init__(folder)
        port, proxy_port = free_ports(2)
        ca = DevelopmentCa.make(folder / "ca", "bench")
        node, gateway = (ca.issue(role, "n0") for role in (Role.NODE, Role.GATEWAY))
        self._tls = ClusterTls(CertificateFiles(ca.file, gateway.certificate, gateway.key))
        placed = cores()
        self._engine = StandInEngine.of((port,), folder / "engine.log", placed["engine"])
        self.add(self._engine)
        argv = python(
            *("rose.proxy.main", "--host=127.0.0.1", f"--port={proxy_port}"),
            *(f"--replica={port}=engine", f"--ca={ca.file}"),
            *(f"--certificate={node.certificate}", f"--key={node.key}"),
        )
        log, core = folder / "proxy.log", placed["router"]
        self._proxy = self.add(BenchProcess("proxy", argv, log, core, piped=True).start())
        if b"listening" not in self._proxy.read():
            raise EngineStartError("the proxy does not start")
        ticks = BenchProcess("guard", python("bench.micro.proxy", "--tick"), None, core, piped=True)
        self._guard = self.add(ticks.start())
        self._guard.ask(b"")
        os.sched_setaffinity(0, placed["generator"])
        self._urls = {
            STRAIGHT: f"http://127.0.0.1:{port}",
            PROXIED: f"https://127.0.0.1:{proxy_port}/engine",
        }
        self._streams: dict[str, list[Stream]] = {STRAIGHT: [], PROXIED: []}

    async def load(self, streams: int, gap_s: float, rounds: int, seconds: float) -> ProxyLoad:
        """Measure one load, after a block of each arm that makes connections and counts nothing."""
        await asyncio.to_thread(self._engine.pace, gap_s, gap_s, PIECE_TOKENS)
        for name in (STRAIGHT, PROXIED):
            # Handshakes are a millisecond or two each, on either side.
            await self._half(name, streams, 0.0, streams / HANDSHAKES_A_S)
        found: dict[str, list[ProxyBlock]] = {STRAIGHT: [], PROXIED: []}
        for number in range(rounds):
            order = (STRAIGHT, PROXIED) if number % 2 == 0 else (PROXIED, STRAIGHT)
            for name in order:
                found[name].append(await self._half(name, streams, seconds))
        pairs = list(zip(found[STRAIGHT], found[PROXIED], strict=True))
        return ProxyLoad(
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
    ) -> ProxyBlock:
        await asyncio.to_thread(self._guard.ask, b"")
        began_s, before = time.monotonic(), self._proxy.cpu_use()
        path = "/engine" + REPLICA.path if name == PROXIED else REPLICA.path
        wire = replace(REPLICA, path=path)
        kept = self._streams[name]
        kept += [Stream(self._urls[name], wire, self._tls) for _ in range(streams - len(kept))]

        def request() -> bytes:
            return wire.request("turn", "bench", PROMPT, PIECES * PIECE_TOKENS)

        until_s = time.monotonic() + seconds
        turns = await block(kept[:streams], request, until_s, spread_s)
        ran_s, _ = self._proxy.cpu_use().share_since(before, time.monotonic() - began_s)
        into = [turn.into_s for turn in turns]
        out = [way_s for turn in turns for _, way_s in turn.chunks]
        gaps = json.loads(await asyncio.to_thread(self._guard.ask, b""))
        in_p50, in_p99 = rounded(into, 0.5, 0.99, scale=1e3)
        out_p50, out_p99 = rounded(out, 0.5, 0.99, scale=1e3)
        gap_p50, gap_p999, gap_max = rounded(gaps, 0.5, 0.999, 1.0, scale=1e3)
        return ProxyBlock(
            turns=len(turns),
            pieces=len(out),
            in_p50_ms=in_p50,
            in_p99_ms=in_p99,
            out_p50_ms=out_p50,
            out_p99_ms=out_p99,
            gap_p50_ms=gap_p50,
            gap_p999_ms=gap_p999,
            gap_max_ms=gap_max,
            proxy_core=round(ran_s, 3),
        )

    def close(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                stream.caller.hang_up()
        super().close()


async def measure(rounds: int, seconds: float) -> list[ProxyLoad]:
    """Measure all loads. Raises EngineStartError."""
    raise_descriptor_limit()
    with (
        tempfile.TemporaryDirectory(prefix="rose-proxy-") as folder,
        ProxyBench(Path(folder)) as bench,
    ):
        return [await bench.load(*load, rounds, seconds) for load in LOADS]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if the promise does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="pairs of blocks")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each block")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tick", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tick:
        return tick()
    return reported("proxy", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    # A gateway runs on this loop, too.
    loads = uvloop.run(measure(args.rounds, args.seconds))
    found = {
        "machine": machine(),
        "most_added_ms": MOST_ADDED_MS,
        "good": all(load.good for load in loads),
        "loads": loads,
    }
    put(found, args.out)
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main())

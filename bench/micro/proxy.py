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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.common.processes import BenchProcess, ProcessFleet, cores, python
from bench.common.report import parser_of, put_judged, reported
from bench.common.stats import rounded
from bench.load.standin import StandInEngine
from bench.load.streams import REPLICA, Stream, added, alternate, block
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
STRAIGHT, PROXIED = ARMS = "straight", "proxied"
SHARES: Final = {
    "in": {"p50": 0.5, "p99": 0.99},
    "out": {"p50": 0.5, "p99": 0.99},
    "gap": {"p50": 0.5, "p999": 0.999, "max": 1.0},
}
SPREAD_S: Final = 1.0
HANDSHAKES_A_S: Final = 100
TICK_S: Final = 0.02


def good(load: Mapping[str, Any]) -> bool:
    """Return True if the proxy keeps the promise for so many streams."""
    if load["streams"] > FEW:
        return bool(load["added_gap_p999_ms"] <= MOST_GAP_MS)
    return bool(max(load["added_in_p50_ms"], load["added_out_p50_ms"]) <= MOST_ADDED_MS)


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
        self._streams: dict[str, list[Stream]] = {name: [] for name in ARMS}

    async def load(self, streams: int, gap_s: float, rounds: int, seconds: float) -> dict[str, Any]:
        """Measure one load, after a block of each arm that makes connections and counts nothing."""
        await asyncio.to_thread(self._engine.pace, gap_s, gap_s, PIECE_TOKENS)
        for name in ARMS:
            # Handshakes are a millisecond or two each, on either side.
            await self._half(name, streams, 0.0, streams / HANDSHAKES_A_S)
        found = await alternate(ARMS, rounds, lambda name: self._half(name, streams, seconds))
        differences = {
            f"added_{name}_ms": added(found[PROXIED], found[STRAIGHT], f"{name}_ms", 3)
            for name in ("in_p50", "out_p50", "gap_p999")
        }
        return {"streams": streams, "piece_every_s": gap_s, **differences, **found}

    async def _half(
        self, name: str, streams: int, seconds: float, spread_s: float = SPREAD_S
    ) -> dict[str, Any]:
        """Return milliseconds of a turn's way in, a piece's way out and a guard's gap."""
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
        out = [way_s for turn in turns for _, way_s in turn.chunks]
        times_s = {"in": [turn.into_s for turn in turns], "out": out}
        times_s["gap"] = json.loads(await asyncio.to_thread(self._guard.ask, b""))
        found: dict[str, Any] = {"turns": len(turns), "pieces": len(out)}
        for what, shares in SHARES.items():
            values = rounded(times_s[what], *shares.values(), scale=1e3)
            found |= {f"{what}_{name}_ms": v for name, v in zip(shares, values, strict=True)}
        return found | {"proxy_core": round(ran_s, 3)}

    def close(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                stream.caller.hang_up()
        super().close()


async def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure all loads. Raises EngineStartError."""
    raise_descriptor_limit()
    with (
        tempfile.TemporaryDirectory(prefix="rose-proxy-") as folder,
        ProxyBench(Path(folder)) as bench,
    ):
        return [await bench.load(*load, rounds, seconds) for load in LOADS]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if the promise does not hold."""
    parser = parser_of(__doc__, "bench.micro.proxy", rounds=6, seconds=8.0)
    parser.add_argument("--tick", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    def run() -> int:
        # A gateway runs on this loop, too.
        loads = uvloop.run(measure(args.rounds, args.seconds))
        held = all(map(good, loads))
        found = {"most_added_ms": MOST_ADDED_MS, "good": held, "loads": loads}
        return put_judged(found, args.out, good=held)

    return tick() if args.tick else reported("proxy", run)


if __name__ == "__main__":
    sys.exit(main())

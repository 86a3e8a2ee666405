"""Cost of tracing to a gateway: processor time of a turn, with a trace, and with spans of it.

    python -m bench.micro.tracing [--rounds N] [--seconds S] [--out FILE]

Prints one JSON object. Gateways before a stand-in engine that answers at once, all with an event
log, and short turns one after the other on a few streams: the most turns a second, so the most
traces. The arms are the same turn without a trace, with one that is not recorded, with one that is
(the event log gets `turn_traced`), and, where OpenTelemetry is installed, through a gateway that
sends spans to a collector, a second stand-in. Blocks alternate; added is the median over rounds of
the difference to the arm without.
"""

import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.common.processes import BenchProcess, ProcessFleet, cores, gateway_command
from bench.common.report import parser_of, put_judged
from bench.load.standin import StandInEngine
from bench.load.streams import TOKEN_STREAM, Stream, added, alternate, block
from rose.addresses import free_ports

STREAMS: Final = 8
PIECES: Final = 2
PIECE_TOKENS: Final = 8
PROMPT: Final = list(range(1_000, 1_128))
WITHOUT, UNRECORDED, RECORDED, SPANS = "no trace", "a trace", "a recorded trace", "spans"


def trace_of(arm: str) -> bytes:
    """Return the line of a request's head; each turn is of a trace of its own."""
    if arm == WITHOUT:
        return b""
    flag = "00" if arm == UNRECORDED else "01"
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return f"traceparent: 00-{trace}-{span}-{flag}\r\n".encode()


class TracingBench(ProcessFleet):
    """All processes, placed; `block` measures one arm for a while. Context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises EngineStartError when a process does not start."""
        super().__init__(folder)
        placed = cores()
        port, plain, spanned, collector = free_ports(4)
        engine = StandInEngine.of((port,), folder / "engine.log", placed["engine"])
        self.add(engine)
        engine.pace(0.0, 0.0, PIECE_TOKENS)
        self.arms = [WITHOUT, UNRECORDED, RECORDED]
        gateways: dict[int, dict[str, str]] = {plain: {}}
        if find_spec("opentelemetry"):
            sink = StandInEngine.of((collector,), folder / "collector.log", placed["engine"])
            sink.name = "collector"
            self.add(sink)
            gateways[spanned] = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.urls[0]}
            self.arms.append(SPANS)
        self._gateways: dict[str, tuple[BenchProcess, str]] = {}
        for number, env in gateways.items():
            options = ("--max-waiting=4096", f"--log-dir={folder / f'logs-{number}'}")
            argv = gateway_command(number, {"e0": engine.urls[0]}, 64, *options)
            log, core = folder / f"gateway-{number}.log", placed["router"]
            gateway = self.add(BenchProcess(f"gateway-{number}", argv, log, core, env).start())
            url = f"http://127.0.0.1:{number}"
            gateway.wait_answers(f"{url}/health", 1)
            for arm in [SPANS] if env else self.arms[:3]:
                self._gateways[arm] = gateway, url
        os.sched_setaffinity(0, placed["generator"])

    async def block(self, arm: str, seconds: float) -> dict[str, Any]:
        """Measure turns of one arm, one after the other on each stream."""
        gateway, url = self._gateways[arm]
        streams = [Stream(url, TOKEN_STREAM) for _ in range(STREAMS)]
        began_s, before_s = time.monotonic(), gateway.cpu_use().ran_s

        def request() -> bytes:
            name, budget = secrets.token_hex(8), PIECES * PIECE_TOKENS
            return TOKEN_STREAM.request(name, "bench", PROMPT, budget, trace_of(arm))

        try:
            turns = await block(streams, request, began_s + seconds)
        finally:
            for stream in streams:
                stream.caller.hang_up()
        spent_s, ran_s = time.monotonic() - began_s, gateway.cpu_use().ran_s - before_s
        return {
            "turns": len(turns),
            "turns_a_s": round(len(turns) / spent_s, 1),
            "cpu_us": round(1e6 * ran_s / len(turns), 1),
            "p50_ms": round(1e3 * median(turn.ended_s - turn.sent_s for turn in turns), 3),
        }


async def measure(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure all arms. Raises EngineStartError."""
    prefix = "rose-tracing-"
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, TracingBench(Path(folder)) as bench:
        for arm in bench.arms:
            await bench.block(arm, seconds / 4)
        found = await alternate(bench.arms, rounds, lambda arm: bench.block(arm, seconds))
    base_us = median(block["cpu_us"] for block in found[WITHOUT])
    rows = []
    for name, blocks in found.items():
        added_us = added(blocks, found[WITHOUT], "cpu_us", 1)
        row = {"name": name, "cpu_us": round(median(block["cpu_us"] for block in blocks), 1)}
        row |= {"added_us": added_us, "added_share": round(added_us / base_us, 4)}
        rows.append(row | {"blocks": blocks})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = parser_of(__doc__, "bench.micro.tracing", rounds=6, seconds=5.0).parse_args(argv)
    arms = asyncio.run(measure(args.rounds, args.seconds))
    return put_judged({"streams": STREAMS, "arms": arms}, args.out, good=True)


if __name__ == "__main__":
    sys.exit(main())

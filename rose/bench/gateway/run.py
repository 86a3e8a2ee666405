"""The rounds: all arms at all numbers of streams, one after the other, again and again."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rose.bench.gateway.arms import (
    DIRECT,
    Arm,
    arms_over_standin,
    peer_command,
    rose_command,
)
from rose.bench.gateway.load import Load
from rose.bench.gateway.processes import Generator, Measured, StandInEngine
from rose.bench.gateway.wires import TOKEN_STREAM
from rose.errors import EngineStartError

PORTS = 4
Say = Callable[[str], None]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class StandInBench:
    """Everything over the stand-in engine. Context manager."""

    def __init__(
        self,
        folder: Path,
        peers: Mapping[str, str],
        cores: Mapping[str, Sequence[int]],
        max_streams: int,
        say: Say,
    ) -> None:
        self._folder = folder
        self._peers = peers
        self._cores = cores
        self._max_streams = max_streams
        self._say = say
        self.skipped: dict[str, str] = {}

    def __enter__(self) -> "StandInBench":
        self._stack = ExitStack()
        cores = self._cores
        self._engine = StandInEngine(free_ports(PORTS), self._log("engine"), cores["engine"])
        self._stack.callback(self._engine.end)
        self._generator = Generator(self._log("generator"), cores["generator"])
        self._stack.callback(self._generator.end)
        self._routers: dict[str, tuple[Measured, str]] = {}
        try:
            self._start_routers()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def rounds(self, streams: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
        """All cells."""
        url = self._routers["rose"][1]
        can_stream = _streams(url)
        if not can_stream:
            self.skipped["rose, tokens"] = "this gateway does not stream"
        arms = arms_over_standin([*self._routers], can_stream, stock=False)
        return [
            self._cell(arm, Load(count, seconds), number)
            for number in range(rounds)
            for count in streams
            for arm in arms
        ]

    def _cell(self, arm: Arm, load: Load, number: int) -> dict[str, Any]:
        self._say(f"{arm.engine}, {arm.name}: {load.streams} streams, round {number + 1}")
        self._engine.pace(load.first_s, load.gap_s, load.chunk_tokens)
        router, urls = None, self._engine.urls
        if arm.router != DIRECT:
            router, url = self._routers[arm.router]
            urls = [url]
        cpu = [process.cpu_s() if process else 0.0 for process in (self._engine, router)]
        began_s = time.monotonic()
        seed = hash((arm.name, load.streams, number)) % 100_000
        result = self._generator.cell(urls, arm.wire.name, asdict(load), seed)
        took_s = time.monotonic() - began_s
        after = [process.cpu_s() if process else 0.0 for process in (self._engine, router)]
        busy = [(b - a) / took_s for a, b in zip(cpu, after, strict=True)]
        return {
            "engine": arm.engine,
            "router": arm.router,
            "wire": arm.wire.name,
            "baseline": arm.baseline.name,
            "streams": load.streams,
            "round": number,
            "load": load.as_json(),
            "engine_busy": busy[0],
            "router_busy": busy[1],
            **result,
        }

    def _start_routers(self) -> None:
        rose_port, *ports = free_ports(1 + len(self._peers))
        each = self._max_streams
        commands = {"rose": (rose_port, rose_command(rose_port, self._engine.urls, each))}
        for (name, text), port in zip(self._peers.items(), ports, strict=True):
            commands[name] = (port, peer_command(text, port, self._engine.urls))
        for name, (port, argv) in commands.items():
            router = Measured(name, argv, self._log(name), self._cores["router"])
            self._stack.callback(router.end)
            url = f"http://127.0.0.1:{port}"
            try:
                router.wait_answers(f"{url}/health")
                self._routers[name] = (router, url)
            except EngineStartError as error:
                if name == "rose":
                    raise
                self.skipped[name] = str(error)

    def _log(self, name: str) -> Path:
        return self._folder / f"gateway-{name}.log"


def _streams(url: str) -> bool:
    """Whether a gateway streams tokens: an earlier one refuses to."""
    body = TOKEN_STREAM.body("probe", [1, 2, 3], 8)
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{url}{TOKEN_STREAM.path}", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
            return b"data:" in answer.read()
    except urllib.error.HTTPError:
        return False


def write(folder: Path, result: Mapping[str, Any], text: str) -> None:
    """gateway.json and gateway.txt."""
    (folder / "gateway.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "gateway.txt").write_text(text)

"""The rounds: all arms at all numbers of streams, one after the other, again and again."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gateway.arms import (
    DIRECT,
    ROSE,
    GatewayArm,
    arms_over_standin,
    peer_command,
    rose_command,
)
from bench.gateway.generator import Load
from bench.gateway.processes import Generator, MeasuredProcess, StandInEngine
from rose.addresses import free_ports
from rose.errors import EngineStartError

# Of ROSE replicas and of stock engines.
PORTS = 4 + 4
Say = Callable[[str], None]


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
        self._seeds = itertools.count()
        self.skipped: dict[str, str] = {}

    def __enter__(self) -> "StandInBench":
        self._stack = ExitStack()
        cores = self._cores
        self._engine = StandInEngine(free_ports(PORTS), self._log("engine"), cores["engine"])
        self._stack.callback(self._engine.end)
        self._generator = Generator(self._log("generator"), cores["generator"])
        self._stack.callback(self._generator.end)
        self._routers: dict[str, tuple[MeasuredProcess, str]] = {}
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
        arms = arms_over_standin([name for name in self._peers if name in self._routers])
        return [
            self._cell(arm, Load(count, seconds), number)
            for number in range(rounds)
            for count in streams
            for arm in arms
        ]

    def _cell(self, arm: GatewayArm, load: Load, number: int) -> dict[str, Any]:
        self._say(f"{load.streams} streams, {arm.engine}, {arm.router}, {arm.wire.name}, {number}")
        self._engine.pace(load.first_s, load.gap_s, load.chunk_tokens)
        router, urls = None, self._engine.stock_urls if arm.stock else self._engine.urls
        if arm.router != DIRECT:
            router, url = self._routers[arm.process]
            urls = [url]
        processes = {"engine": self._engine, "router": router}
        before = {who: process.used() for who, process in processes.items() if process}
        began_s = time.monotonic()
        result = self._generator.cell(urls, arm.wire.name, asdict(load), next(self._seeds))
        took_s = time.monotonic() - began_s
        cell: dict[str, Any] = {
            "engine": arm.engine,
            "router": arm.router,
            "wire": arm.wire.name,
            "baseline": arm.baseline.name,
            "streams": load.streams,
            "round": number,
            "load": load.as_json(),
            "due_turns_per_s": load.streams / load.turn_s,
            "engine_busy": 0.0,
            "router_busy": 0.0,
            "router_waited": 0.0,
        }
        for who, used in before.items():
            after = processes[who].used()  # type: ignore[union-attr]
            cell[f"{who}_busy"] = (after.ran_s - used.ran_s) / took_s
            cell[f"{who}_waited"] = (after.waited_s - used.waited_s) / took_s
        return cell | result

    def _start_routers(self) -> None:
        """Peers that do not start are left out; ROSE's own gateway has to."""
        engine, ports = self._engine, iter(free_ports(2 + 2 * len(self._peers)))
        commands: dict[str, tuple[int, list[str]]] = {}
        for name, urls in ((ROSE, engine.urls), (f"{ROSE}-stock", engine.stock_urls)):
            port = next(ports)
            commands[name] = (port, rose_command(port, urls, self._max_streams))
        for name, text in self._peers.items():
            port = next(ports)
            commands[name] = (port, peer_command(text, port, next(ports), engine.stock_urls))
        for name, (port, argv) in commands.items():
            router = MeasuredProcess(name, argv, self._log(name), self._cores["router"])
            self._stack.callback(router.end)
            url = f"http://127.0.0.1:{port}"
            try:
                replicas = 0 if name in self._peers else PORTS // 2
                router.wait_answers(f"{url}/health", replicas)
                self._routers[name] = (router, url)
            except EngineStartError as error:
                if name not in self._peers:
                    raise
                self.skipped[name] = str(error)

    def _log(self, name: str) -> Path:
        return self._folder / f"gateway-{name}.log"


def write(folder: Path, result: Mapping[str, Any], text: str) -> None:
    """gateway.json and gateway.txt."""
    (folder / "gateway.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "gateway.txt").write_text(text)

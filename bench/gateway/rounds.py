"""Rounds over the stand-in engine: itself, ROSE's gateway and other routers, by turns."""

import itertools
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from bench.common.processes import BenchProcess, CpuUse, ProcessFleet, cores, gateway_command
from bench.load.standin import StandInEngine
from bench.load.streams import Generator, StreamLoad
from bench.load.wires import COMPLETIONS, REPLICA, SGLANG, TOKEN_STREAM, TOKENS, Wire
from rose.addresses import free_ports
from rose.errors import ConfigError, EngineStartError

DIRECT, ROSE = "direct", "rose"
# Peers by the module that holds them; all take the same options.
PEERS = {"vllm-router": "vllm_router", "sglang-router": "sglang_router"}
# sglang-router takes token ids on SGLang's own route only.
PEER_WIRES = {"vllm-router": COMPLETIONS, "sglang-router": SGLANG}
MANY = "100000"
# ROSE replicas and stock engines.
PORTS = 4 + 4
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GatewayArm:
    """One way to the engine, through the process of `router`, which is DIRECT for none.

    `stock`: the engine is one without ROSE. `baseline`: the wire of the direct arm beside it.
    """

    router: str
    wire: Wire
    baseline: Wire
    stock: bool = False

    @property
    def engine(self) -> str:
        """Name of the engine in the table, which is never a real one's."""
        return "standin stock" if self.stock else "standin replica"

    @property
    def process(self) -> str:
        """Name of the router process: ROSE's gateway runs once for each kind of engine."""
        return f"{self.router}-stock" if self.router == ROSE and self.stock else self.router


def arms_over_standin(peers: Sequence[str]) -> list[GatewayArm]:
    arms = [
        GatewayArm(DIRECT, REPLICA, REPLICA),
        GatewayArm(ROSE, TOKENS, REPLICA),
        GatewayArm(ROSE, TOKEN_STREAM, REPLICA),
        GatewayArm(DIRECT, COMPLETIONS, COMPLETIONS, stock=True),
        GatewayArm(ROSE, TOKEN_STREAM, COMPLETIONS, stock=True),
    ]
    wires = {peer: PEER_WIRES.get(peer, COMPLETIONS) for peer in peers}
    others = dict.fromkeys(wire for wire in wires.values() if wire is not COMPLETIONS)
    arms += [GatewayArm(DIRECT, wire, wire, stock=True) for wire in others]
    return arms + [GatewayArm(peer, wire, wire, stock=True) for peer, wire in wires.items()]


def peer_command(text: str, port: int, metrics_port: int, urls: Sequence[str]) -> list[str]:
    """Return a peer's command line, with `{port}`, `{metrics_port}` and `{urls}` filled in."""
    values = {"port": str(port), "metrics_port": str(metrics_port), "urls": " ".join(urls)}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return shlex.split(text)


def peers(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return commands by name, given or installed, and the names of the peers that are missing."""
    commands: dict[str, str] = {}
    for text in given:
        name, mark, command = text.partition("=")
        if not mark or "{port}" not in command or "{urls}" not in command:
            raise ConfigError(f"--peer {text}: write NAME=COMMAND with {{port}} and {{urls}} in it")
        commands[name] = command
    missing = []
    for name, module in PEERS.items():
        if name in commands:
            continue
        if find_spec(module) is None:
            missing.append(name)
            continue
        commands[name] = (
            f"{shlex.quote(sys.executable)} -m {module}.launch_router --host 127.0.0.1"
            f" --port {{port}} --worker-urls {{urls}} --max-concurrent-requests {MANY}"
            f" --prometheus-port {{metrics_port}}"
        )
    return commands, missing


def cell_of(
    names: Mapping[str, Any], load: StreamLoad, used: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """Return the record of one cell, less what the generator measured.

    names: engine, router, wire, baseline, round. used: shares of the time that each process had a
    processor, and that it waited for one.
    """
    cell: dict[str, Any] = {**names, "streams": load.streams, "load": load.as_json()}
    cell |= {"engine_busy": 0.0, "router_busy": 0.0, "router_waited": 0.0}
    for who, (busy, waited) in used.items():
        cell |= {f"{who}_busy": busy, f"{who}_waited": waited}
    return cell


class StandInBench:
    """Processes over the stand-in engine. Context manager."""

    def __init__(self, folder: Path, peers: Mapping[str, str], max_streams: int, say: Say) -> None:
        self._peers, self._max_streams, self._say = peers, max_streams, say
        self._cores, self._fleet = cores(), ProcessFleet(folder)
        self._seeds = itertools.count()
        self._urls: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            ports = free_ports(PORTS)
            self._engine = StandInEngine.of(ports, self._log("engine"), self._cores["engine"])
            self._fleet.add(self._engine)
            self._generator = Generator.of(self._log("generator"), self._cores["generator"])
            self._fleet.add(self._generator.start())
            self._start_routers()
        except BaseException:
            self._fleet.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    def rounds(self, streams: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
        arms = arms_over_standin([name for name in self._peers if name in self._urls])
        return [
            self._cell(arm, StreamLoad(count, seconds), number)
            for number in range(rounds)
            for count in streams
            for arm in arms
        ]

    def _cell(self, arm: GatewayArm, load: StreamLoad, number: int) -> dict[str, Any]:
        self._say(f"{load.streams} streams, {arm.engine}, {arm.router}, {arm.wire.name}, {number}")
        self._engine.pace(load.first_s, load.gap_s, load.chunk_tokens)
        processes: dict[str, BenchProcess] = {"engine": self._engine}
        urls = self._engine.stock_urls if arm.stock else self._engine.urls
        if arm.router != DIRECT:
            processes["router"] = self._fleet.members[arm.process]
            urls = [self._urls[arm.process]]
        before: dict[str, CpuUse] = {who: each.cpu_use() for who, each in processes.items()}
        began_s = time.monotonic()
        measured = self._generator.cell(urls, arm.wire.name, load, next(self._seeds))
        took_s = time.monotonic() - began_s
        used = {
            who: each.cpu_use().share_since(before[who], took_s) for who, each in processes.items()
        }
        names = {
            "engine": arm.engine,
            "router": arm.router,
            "wire": arm.wire.name,
            "baseline": arm.baseline.name,
            "round": number,
            "due_turns_per_s": load.streams / load.turn_s,
        }
        return cell_of(names, load, used) | dict(measured)

    def _start_routers(self) -> None:
        """Start all routers; peers that do not start are left out, ROSE's own gateway has to."""
        engine, ports = self._engine, iter(free_ports(2 + 2 * len(self._peers)))
        commands: dict[str, tuple[int, Sequence[str]]] = {}
        for name, urls in ((ROSE, engine.urls), (f"{ROSE}-stock", engine.stock_urls)):
            port = next(ports)
            replicas = {f"e{k}": url for k, url in enumerate(urls)}
            command = gateway_command(port, replicas, self._max_streams, "--max-waiting=4096")
            commands[name] = (port, command)
        for name, text in self._peers.items():
            port = next(ports)
            commands[name] = (port, peer_command(text, port, next(ports), engine.stock_urls))
        for name, (port, argv) in commands.items():
            router = BenchProcess(name, argv, self._log(name), self._cores["router"])
            self._fleet.add(router.start())
            url = f"http://127.0.0.1:{port}"
            try:
                router.wait_answers(f"{url}/health", 0 if name in self._peers else PORTS // 2)
                self._urls[name] = url
            except EngineStartError as error:
                if name not in self._peers:
                    raise
                self.skipped[name] = str(error)

    def _log(self, name: str) -> Path:
        return self._fleet.folder / f"gateway-{name}.log"

"""LittleCluster: schedulers, nodes with counting engines, and gateways, each a process of its own.

Any of them may be ended, stopped and started again: a process keeps its name, its port and its
folder. The hosts beside the guests live in the test's process.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np

from executor import ControlPage, Grant, GrantMode
from rose.addresses import free_ports
from rose.errors import UnavailableError
from rose.process.child import group_alive
from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LeaderChannel
from tests.harness.seated_host import SeatedHost
from tests.harness.waiting import PATIENCE_S
from weight_transfer import SigningKey, TensorBits

DAEMON = Path(__file__).with_name("counting_daemon.py")
JOB = "grpo"
STOP_S = 30.0
ROOT = Path(__file__).parents[3]


def start_python(*argv: str, log: Path) -> "subprocess.Popen[str]":
    """Start Python with these arguments and pipes for its input and output; errors go to `log`."""
    with log.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def tensors(version: int) -> dict[str, TensorBits]:
    """Weights of a version."""
    bits = np.arange(4_096, dtype=np.uint16)
    bits[::7] += np.uint16(version)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


@dataclass
class Member:
    """One process of the cluster, in all its lives."""

    name: str
    argv: Sequence[str]
    log: Path
    events: Path
    process: "subprocess.Popen[str] | None" = None
    lives: int = 0
    # Bytes of the log that earlier lives wrote.
    _past_bytes: int = 0

    def start(self) -> None:
        self._past_bytes = self.events.stat().st_size if self.events.exists() else 0
        self.process = start_python(*self.argv, log=self.log)
        self.lives += 1

    @property
    def said(self) -> str:
        """Log of this life."""
        whole = self.events.read_bytes() if self.events.exists() else b""
        return whole[self._past_bytes :].decode()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            # The stop takes effect later; calls would be answered meanwhile.
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Returns its exit code, once nothing of it runs."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(STOP_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def close(self) -> None:
        if self.running:
            self.end(signal.SIGKILL)


@dataclass
class LittleHost:
    """The host of one node, as idle as can be, and the page between them."""

    path: Path
    page: ControlPage = field(init=False)

    def __post_init__(self) -> None:
        self.page = ControlPage.create(self.path)
        self._host = SeatedHost(self.page)
        self._host.tell()
        self._host.seat.start()

    @property
    def grant(self) -> Grant:
        return self.page.grant.peek() or Grant()

    @property
    def harvests(self) -> bool:
        """True if a guest may make steps now."""
        grant = self.grant
        lives = time.monotonic_ns() < grant.expiry_ns
        return lives and grant.mode in (GrantMode.RUN, GrantMode.THROTTLE)

    def close(self) -> None:
        self._host.close()
        self.page.close()


class LittleCluster:
    """Members by name: s0, s1, …; n0, n1, …; gw0, gw1, …

    store: what the schedulers are told; a SQLite file unless given. metrics: schedulers and nodes
    serve them, where `scraped` says, as gateways do always.
    """

    def __init__(
        self,
        folder: Path,
        *,
        schedulers: int = 2,
        nodes: int = 3,
        gateways: int = 2,
        store: str = "",
        metrics: bool = False,
    ) -> None:
        self.folder = folder
        # Seed of this test's weights alone; a trainer in a process of its own gets it.
        self.seed = secrets.token_hex(32)
        self.key = SigningKey.from_hex(self.seed)
        self.store = store or str(folder / "store.sqlite")
        ports = free_ports(schedulers + gateways + nodes + 1)
        self._s, self._gw = ports[:schedulers], ports[schedulers : schedulers + gateways]
        self._n, self.trainer_port = ports[schedulers + gateways : -1], ports[-1]
        self.members: dict[str, Member] = {}
        named = [f"s{k}" for k in range(schedulers)] + [f"n{k}" for k in range(nodes)]
        self._metrics = dict(zip(named, free_ports(len(named)), strict=True)) if metrics else {}
        self.hosts = {f"n{k}": LittleHost(folder / f"page-n{k}") for k in range(nodes)}
        for number in range(schedulers):
            self._add(f"s{number}", self._scheduler(number))
        for number in range(nodes):
            self._add(f"n{number}", self._node(number))
        for number in range(gateways):
            self._add(f"gw{number}", self._gateway(number))

    @property
    def addresses(self) -> str:
        """Addresses of all schedulers."""
        return ",".join(f"127.0.0.1:{port}" for port in self._s)

    @property
    def urls(self) -> list[str]:
        """Addresses of all gateways."""
        return [f"http://127.0.0.1:{port}" for port in self._gw]

    @property
    def scraped(self) -> dict[str, str]:
        """Addresses of `/metrics`, by the member that serves them."""
        ports = self._metrics | {f"gw{k}": port for k, port in enumerate(self._gw)}
        return {name: f"127.0.0.1:{port}" for name, port in ports.items()}

    def of(self, kind: str) -> list[Member]:
        """All schedulers (`s`), nodes (`n`) or gateways (`gw`)."""
        return [each for name, each in self.members.items() if name.rstrip("0123456789") == kind]

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            self.members[name].start()

    def close(self) -> None:
        for member in self.members.values():
            member.close()
        for pid in {call["pid"] for node in self.hosts for call in self.calls(node, "start")}:
            if group_alive(pid):
                os.killpg(pid, signal.SIGKILL)
        for host in self.hosts.values():
            host.close()

    # ---- what is seen of it ----

    def calls(self, node: str, *calls: str) -> list[dict[str, Any]]:
        """Return the journal of a node's engine."""
        return _records(self.folder / f"g{node[1:]}.journal", "call", calls)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Return the events in a member's log."""
        return _records(self.members[name].events, "event", (event,))

    def leader(self, but: str = "") -> str | None:
        """Return the running scheduler that reports that it leads."""
        for member in self.of("s"):
            if member.name == but:
                continue
            said = member.said
            if member.running and said.rfind("scheduler_leads") > said.rfind("steps_down"):
                return member.name
        return None

    async def snapshot(self) -> pb.SnapshotReply | None:
        """Return the leader's snapshot; None while there is no leader."""
        async with LeaderChannel(self.addresses) as channel:
            with contextlib.suppress(UnavailableError, grpc.aio.AioRpcError):
                return await channel.call(
                    lambda stub, left_s: stub.Snapshot(pb.SnapshotRequest(), timeout=left_s), 3.0
                )
        return None

    async def until(
        self, what: str, holds: Callable[[pb.SnapshotReply], object]
    ) -> pb.SnapshotReply:
        """Wait until a snapshot is so."""
        seen: pb.SnapshotReply | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    seen = await self.snapshot()
                    if seen is not None and holds(seen):
                        return seen
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never {what}: {seen}\n{self.last_words()}") from None

    async def leased(self, version: int | None = None) -> pb.SnapshotReply:
        """Wait until every node has its replica leased, at `version`, and its guest may run."""

        def all_leased(seen: pb.SnapshotReply) -> bool:
            rows = [
                row
                for row in seen.replicas
                if row.leased and row.healthy and version in (None, row.policy_version)
            ]
            return len(rows) == len(self.hosts) and all(h.harvests for h in self.hosts.values())

        return await self.until("all leased", all_leased)

    async def led(self, but: str = "") -> str:
        """Wait until somebody leads."""
        async with asyncio.timeout(PATIENCE_S):
            while (leader := self.leader(but)) is None:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        return leader

    async def started(self, name: str) -> None:
        """Wait until a scheduler's newest life answers, as leader or standby."""
        member = self.members[name]
        async with asyncio.timeout(PATIENCE_S):
            while "scheduler_started" not in member.said:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)

    async def served(self, name: str) -> None:
        """Wait until a gateway answers, and sends turns somewhere."""
        url = self.urls[int(name[2:])]
        async with aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with http.get(f"{url}/health") as answer:
                        if (await answer.json())["replicas"]:
                            return
                await asyncio.sleep(0.05)

    def last_words(self) -> str:
        """Return the logs of a failed test."""
        words = []
        for name, member in self.members.items():
            log = member.log.read_text()[-800:] if member.log.exists() else ""
            words.append(f"-- {name}, running {member.running}, {member.lives} lives\n{log}")
            for events in sorted((self.folder / name).glob("events-*.jsonl")):
                words += events.read_text().splitlines()[-6:]
        return "\n".join(words)

    # ---- command lines ----

    def _add(self, name: str, argv: Sequence[str]) -> None:
        kind = {"s": "scheduler", "n": name, "g": "gateway"}[name[0]]
        events = self.folder / name / f"events-{kind}.jsonl"
        self.members[name] = Member(name, argv, self.folder / f"{name}.log", events)

    def _scheduler(self, number: int) -> Sequence[str]:
        # All that is offered is leased at once, whatever it is worth to the job.
        return [
            *("-m", "rose.cli", "scheduler", f"--port={self._s[number]}", f"--store={self.store}"),
            *(f"--log-dir={self.folder / f's{number}'}", "--harvest=ACTIVE", "--policy=spot"),
            "--cooldown-s=0.2",
            *([f"--metrics-port={port}"] if (port := self._metrics.get(f"s{number}")) else []),
        ]

    def _gateway(self, number: int) -> Sequence[str]:
        return [
            *("-m", "rose.cli", "gateway", f"--port={self._gw[number]}", "--max-attempts=64"),
            *(f"--scheduler={self.addresses}", f"--log-dir={self.folder / f'gw{number}'}"),
        ]

    def _node(self, number: int) -> Sequence[str]:
        name = f"n{number}"
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            (model / file).write_text("{}")
        replica = {
            "id": f"g{number}",
            "kind": "guest",
            "model_dir": str(model),
            "port": self._n[number],
            "orphan_s": 20.0,
        }
        settings: dict[str, object] = {
            "node": name,
            "scheduler": self.addresses,
            "run_dir": str(self.folder / name / "run"),
            "log_dir": str(self.folder / name),
            "verify_key": self.key.verify_key.hex,
            "host": {"page": str(self.hosts[name].path), "pid": os.getpid()},
            "replicas": [replica],
        }
        if name in self._metrics:
            settings["metrics_port"] = self._metrics[name]
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps(settings))
        return str(DAEMON), str(self.folder), "--config", str(config)


def _records(path: Path, key: str, values: Sequence[str]) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    # The last line may be half written.
    whole = (line for line in lines if line.endswith("}"))
    return [record for line in whole if (record := json.loads(line)).get(key) in values]


@contextlib.asynccontextmanager
async def little_cluster(folder: Path, **wanted: Any) -> AsyncIterator[LittleCluster]:
    """A cluster whose processes are started; nothing of it is left afterwards."""
    cluster = LittleCluster(folder, **wanted)
    try:
        cluster.start(each.name for each in cluster.of("s"))
        await cluster.until("led", lambda seen: True)
        cluster.start(each.name for kind in ("n", "gw") for each in cluster.of(kind))
        yield cluster
    finally:
        cluster.close()

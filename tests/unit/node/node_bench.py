"""NodeBench: a real scheduler and publisher around one node, whose engines are stand-ins."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from bench.demo.faulty_trainer import CorruptPublisher, CorruptServer
from elastic_scheduler import HarvestMode
from executor import ControlPage, Grant
from rose.addresses import free_port
from rose.engines import EngineSpec, launch
from rose.logs.eventlog import EventLog
from rose.node import HostConfig, NodeConfig, NodeDaemon, ReplicaConfig
from rose.node.guest import supervisor
from rose.node.scheduler_session import NodeIdentity, SchedulerSession
from rose.process.child import ProcessSpec, group_alive
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel, make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, SchedulerStub, add_SchedulerServicer_to_server
from rose.scheduler import LeaseTimes, SchedulerCore, SchedulerService
from rose.scheduler.persistence import load
from tests.fakes.memory_store import InMemoryStore
from tests.harness.processes import Forked
from tests.harness.seated_host import SeatedHost
from weight_transfer import SigningKey, TensorBits

HERE = Path(__file__).parent
PATIENCE_S = 45.0
_T = TypeVar("_T")


def standin_spec(journal: Path) -> Callable[[EngineSpec], ProcessSpec]:
    """Return the maker of command lines that start the stand-in where a node would start vLLM."""

    def spec_of(spec: EngineSpec) -> ProcessSpec:
        argv = (sys.executable, "-S", str(HERE / "standin_engine.py"), str(spec.port), str(journal))
        argv += (spec.model_dir.name,)
        return ProcessSpec(spec.name, argv, log=spec.log, family=True)

    return spec_of


def stand_in(journal: Path, patch: Callable[[Any, str, Any], None]) -> None:
    """Let a node start stand-ins, and look at them often."""
    patch(launch, "process_spec", standin_spec(journal))
    patch(launch, "POLL_INTERVAL_S", 0.02)
    patch(supervisor, "FIRST_BACKOFF_S", 0.02)


def tensors(step: int) -> dict[str, TensorBits]:
    bits = np.arange(4_096, dtype=np.uint16)
    bits[::7] += np.uint16(step)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


class AllCorruptServer(CorruptServer):
    every = 1


class AllCorruptPublisher(CorruptPublisher):
    _server_class = AllCorruptServer


class NodeBench:
    """All but the node; `config` is what a node is to be started with."""

    def __init__(self, folder: Path, kind: str, **replica: object) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.journal = folder / "journal"
        self.key = SigningKey.generate()
        self.events = EventLog(folder, "scheduler")
        times = LeaseTimes(ttl_s=2.0, renew_s=0.1, cooldown_s=0.05)
        core = SchedulerCore(load(()), HarvestMode.ACTIVE, times)
        self.service = SchedulerService(core, InMemoryStore(), self.events)
        self.server = make_server()
        add_SchedulerServicer_to_server(self.service, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.channel = make_channel(self.address)
        self.stub = SchedulerStub(self.channel)
        self.publisher = AllCorruptPublisher(
            "job", self.address, folder / "published", free_port(), self.key
        )
        self.settings = self._settings(kind) | {"replicas": [self._replica(kind) | replica]}
        self.daemons: list[Forked] = []
        self._ticking: asyncio.Task[None] | None = None

    @property
    def config(self) -> NodeConfig:
        return NodeConfig.model_validate(self.settings)

    async def start(self) -> None:
        await self.server.start()
        self._ticking = asyncio.create_task(self.service.tick())
        await self.publisher.start()

    async def close(self) -> None:
        for daemon in self.daemons:
            daemon.end()
        for pid in {call["pid"] for call in self.calls("start")}:
            if group_alive(pid):
                os.killpg(pid, signal.SIGKILL)
        assert self._ticking is not None
        self._ticking.cancel()
        await self.publisher.close()
        await self.channel.close()
        await self.server.stop(0)
        self.events.close()

    def spawn(self, *options: str) -> Forked:
        """A node daemon as a process of its own."""
        path = self.folder / "node.json"
        path.write_text(json.dumps(self.settings))
        argv = [str(HERE / "standin_daemon.py"), str(self.journal), "--config", str(path)]
        daemon = Forked(*argv, *options, stderr=self.folder / "daemon.log")
        self.daemons.append(daemon)
        return daemon

    def calls(self, name: str) -> list[dict[str, Any]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [record for line in lines if (record := json.loads(line))["call"] == name]

    def noted(self, event: str) -> list[dict[str, Any]]:
        """Return the node's events."""
        return self._events_in(self.folder / "logs" / "events-n0.jsonl", event)

    def scheduled(self, event: str) -> list[dict[str, Any]]:
        """Return the scheduler's events."""
        return self._events_in(self.folder / "events-scheduler.jsonl", event)

    def _events_in(self, path: Path, event: str) -> list[dict[str, Any]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for line in lines if (record := json.loads(line))["event"] == event]

    async def row(self) -> pb.Replica | None:
        rows = (await self.stub.Snapshot(pb.SnapshotRequest())).replicas
        return rows[0] if rows else None

    async def until(self, what: str, holds: Callable[[pb.Replica], bool]) -> pb.Replica:
        async def held() -> pb.Replica | None:
            row = await self.row()
            return row if row is not None and holds(row) else None

        return await self.awaited(what, held)

    async def until_noted(self, event: str, times: int = 1) -> dict[str, Any]:
        async def noted() -> dict[str, Any] | None:
            found = self.noted(event)
            return found[-1] if len(found) >= times else None

        return await self.awaited(f"{event} {times} times", noted)

    async def awaited(self, what: str, look: Callable[[], Awaitable[_T | None]]) -> _T:
        """Return what `look` finds at last."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (found := await look()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                return found
        except TimeoutError:
            raise AssertionError(f"never {what}: {await self.row()}\n{self._story()}") from None

    async def until_granted(self, what: str, holds: Callable[[Grant], bool]) -> Grant:
        async def held() -> Grant | None:
            grant = self.page.grant.peek()
            return grant if grant is not None and holds(grant) else None

        return await self.awaited(what, held)

    async def scraped(self, word: str) -> list[str]:
        """Return the samples of the node's /metrics that have a word."""
        url = f"http://127.0.0.1:{self.settings['metrics_port']}/metrics"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            lines = (await answer.text()).splitlines()
        return [line for line in lines if word in line and not line.startswith("#")]

    @asynccontextmanager
    async def running(self, node: NodeDaemon | None = None) -> AsyncIterator[NodeDaemon]:
        """A node daemon in this process, which lasts until the test stops it or ends."""
        self.node = node = node or NodeDaemon(self.config)
        task = asyncio.create_task(node.run())
        yield node
        node.stop()
        await task

    def _story(self) -> str:
        """Return the daemons' logs, for the reader of a failed test."""
        told = [f"{daemon.pid} exited {daemon.poll()}" for daemon in self.daemons]
        for path in (self.folder / "daemon.log", self.folder / "logs" / "events-n0.jsonl"):
            told += [f"--- {path.name}", *(path.read_text().splitlines() if path.exists() else [])]
        return "\n".join(told)

    async def publish(self, version: int) -> None:
        await self.publisher.publish(version, version - 1, tensors(version - 1), tensors(version))

    def _replica(self, kind: str) -> dict[str, object]:
        model = self.folder / "model"
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (model / name).write_text("{}")
        return {"id": "r0", "kind": kind, "model_dir": str(model), "port": free_port()}

    def _settings(self, kind: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "node": "n0",
            "scheduler": self.address,
            "run_dir": str(self.run_dir),
            "log_dir": str(self.folder / "logs"),
            "verify_key": self.key.verify_key.hex,
            "metrics_port": free_port(),
        }
        if kind == "guest":
            self.page = ControlPage.create(self.folder / "page")
            self.host = SeatedHost(self.page)
            self.host.tell()
            self.host.seat.start()
            settings["host"] = {"page": str(self.page.path), "pid": os.getpid()}
        return settings


@asynccontextmanager
async def attached(
    attach: Callable[[Any, Any], Awaitable[None]],
    obey: Callable[[pb.NodeCommand], None],
    folder: Path,
    **options: Any,
) -> AsyncIterator["asyncio.Task[None]"]:
    """A node's session with a scheduler that serves streams by `attach`; its log in `folder`."""

    class SchedulerOfNode(SchedulerServicer):
        async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            await attach(request_iterator, context)

    server = make_server()
    add_SchedulerServicer_to_server(SchedulerOfNode(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    events = EventLog(folder, "n0")
    session = SchedulerSession(address, NodeIdentity("n0"), list, obey, events, **options)
    running = asyncio.create_task(session.run())
    async with asyncio.timeout(PATIENCE_S):
        yield running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    events.close()


def events_in(folder: Path) -> list[str]:
    lines = (folder / "events-n0.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def node_of_one(folder: Path, host: HostConfig, **changes: object) -> NodeConfig:
    """Return a node of one guest, which is on GPU 1 unless the changes say otherwise."""
    guest = {"id": "guest", "kind": "guest", "model_dir": folder, "port": 9000, "device": 1}
    return NodeConfig(
        node="n0",
        scheduler="127.0.0.1:1",
        run_dir=folder,
        log_dir=folder,
        host=host,
        replicas=(ReplicaConfig.model_validate(guest | changes),),
    )

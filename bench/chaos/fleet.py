"""Fleet of real replicas and gateways, which can be revoked, frozen and killed."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from bench.common.processes import BenchProcess, gateway_command
from bench.common.tiny_models import FLEET_MODEL
from rose.addresses import free_ports
from rose.engines import EngineRole, EngineSpec
from rose.engines.launch import EngineProcess
from rose.errors import EngineStartError

START_S = 240.0
GATEWAY_S = 60.0
SEQUENCES = 128
REPLICA_ARGS = ("--skip-tokenizer-init",)
# Engines of a fleet answer to one name, as engines behind a router do.
STOCK_ARGS = ("--served-model-name=policy",)


@dataclass
class ChaosReplica:
    """A real engine and the epochs of the node that it does not have here."""

    spec: EngineSpec
    http: aiohttp.ClientSession
    engine: EngineProcess | None = None
    epoch: int = 0
    up: bool = False

    async def start(self) -> None:
        self.engine = await EngineProcess.start(self.spec)
        await self.engine.wait_healthy(START_S)
        if self.spec.role.is_replica:
            await self.admit()
        self.up = True

    async def drain(self) -> int:
        """Revoke: all its turns end here; returns how many."""
        return int((await self._command("drain"))["aborted"])

    async def admit(self) -> None:
        await self._command("admit")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group of the engine."""
        assert self.engine is not None
        with suppress(ProcessLookupError):
            os.killpg(self.engine.process.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait until nothing of it is left."""
        self.up = False
        self.signal(signal.SIGKILL)
        await self.stop()

    async def stop(self) -> None:
        if self.engine is not None:
            self.signal(signal.SIGCONT)
            await self.engine.stop()

    async def _command(self, path: str) -> dict[str, Any]:
        assert self.engine is not None
        self.epoch += 1
        url, body = f"{self.spec.url}/rose/v1/{path}", {"epoch": self.epoch, "reason": "chaos"}
        async with self.http.post(url, json=body, headers=self.engine.headers) as answer:
            if answer.status != 200:
                raise EngineStartError(f"{url} answers {answer.status}: {await answer.text()}")
            return dict(await answer.json())


@dataclass
class ChaosFleet:
    """Replicas and gateways of one run. Async context manager.

    `replicas` that are given run already and go on afterwards; without them `count` are started.
    With the role STOCK the engines know nothing of ROSE, and cannot be drained or admitted.
    """

    folder: Path
    model_dir: Path
    count: int
    gateways_count: int = 2
    gateway_options: Sequence[str] = ()
    role: EngineRole = EngineRole.DEDICATED
    replicas: list[ChaosReplica] = field(default_factory=list)
    gateways: list[BenchProcess] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    _own: list[ChaosReplica] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        try:
            if not self.replicas:
                ports = free_ports(self.count)
                self._own = [self._replica(f"replica-{k}", port) for k, port in enumerate(ports)]
                self.replicas = [*self._own]
            await asyncio.gather(*(replica.start() for replica in self._own))
            for number, port in enumerate(free_ports(self.gateways_count)):
                self.gateways.append(self._gateway(number, port))
                self.urls.append(f"http://127.0.0.1:{port}")
            await asyncio.gather(*(self.start_gateway(k) for k in range(self.gateways_count)))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def start_gateway(self, number: int) -> None:
        """Start a gateway; return once it knows a replica. Raises EngineStartError."""
        gateway = self.gateways[number].start()
        health = f"{self.urls[number]}/health"
        await asyncio.to_thread(gateway.wait_answers, health, 1, GATEWAY_S)

    async def _close(self) -> None:
        for gateway in self.gateways:
            gateway.kill()
        for replica in self._own:
            await replica.stop()
        await self.http.close()

    def _replica(self, name: str, port: int) -> ChaosReplica:
        spec = EngineSpec(
            name=name,
            role=self.role,
            model_dir=self.model_dir,
            port=port,
            log=self.folder / f"{name}.log",
            dtype="float32",
            max_model_len=FLEET_MODEL.max_positions,
            max_num_seqs=SEQUENCES,
            stream_interval=4,
            extra_args=REPLICA_ARGS if self.role.is_replica else STOCK_ARGS,
            extra_env={"CUDA_VISIBLE_DEVICES": ""},
        )
        return ChaosReplica(spec, self.http)

    def _gateway(self, number: int, port: int) -> BenchProcess:
        urls = {replica.spec.name: replica.spec.url for replica in self.replicas}
        options = ("--max-attempts=64", *self.gateway_options)
        argv = gateway_command(port, urls, SEQUENCES, *options)
        return BenchProcess(f"gateway-{number}", argv, self.folder / f"gateway-{number}.log")

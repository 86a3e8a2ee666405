"""Real replicas and gateways, and what can be done to them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from bench.common.tiny_models import FLEET_MODEL
from rose.addresses import free_port
from rose.engines import EngineRole, EngineSpec
from rose.engines.launch import EngineProcess
from rose.errors import EngineStartError

START_S = 240.0
SEQUENCES = 128
REPLICA_ARGS = ("--skip-tokenizer-init",)
# All of a fleet answer to one name, as engines behind a router do.
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
        """Start it and let turns in."""
        self.engine = await EngineProcess.start(self.spec)
        await self.engine.wait_healthy(START_S)
        if self.spec.role.is_replica:
            await self.admit()
        self.up = True

    async def drain(self) -> int:
        """Revoke: all its turns end here; returns how many."""
        return int((await self._command("drain"))["aborted"])

    async def admit(self) -> None:
        """Let turns in again."""
        await self._command("admit")

    def signal(self, number: signal.Signals) -> None:
        """To the whole group of the engine."""
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
class GatewayProcess:
    """A gateway over all replicas, on a port that it keeps."""

    argv: Sequence[str]
    port: int
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, http: aiohttp.ClientSession) -> None:
        """Start it; returns once it answers. Raises EngineStartError."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220, S603 - takes a millisecond; our own
                self.argv, stdout=log, stderr=log, process_group=0
            )
        for _ in range(600):
            with suppress(aiohttp.ClientError, OSError):
                async with http.get(f"{self.url}/health") as answer:
                    if (await answer.json())["replicas"]:
                        return
            await asyncio.sleep(0.1)
        raise EngineStartError(f"the gateway does not answer; see {self.log}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


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
    gateways: list[GatewayProcess] = field(default_factory=list)
    _own: list[ChaosReplica] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        try:
            if not self.replicas:
                self._own = [self._replica(f"replica-{k}") for k in range(self.count)]
                self.replicas = [*self._own]
            await asyncio.gather(*(replica.start() for replica in self._own))
            self.gateways = [self._gateway(k) for k in range(self.gateways_count)]
            await asyncio.gather(*(gateway.start(self.http) for gateway in self.gateways))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    @property
    def urls(self) -> list[str]:
        """Of all gateways."""
        return [gateway.url for gateway in self.gateways]

    async def _close(self) -> None:
        for gateway in self.gateways:
            gateway.kill()
        for replica in self._own:
            await replica.stop()
        await self.http.close()

    def _replica(self, name: str) -> ChaosReplica:
        spec = EngineSpec(
            name=name,
            role=self.role,
            model_dir=self.model_dir,
            port=free_port(),
            log=self.folder / f"{name}.log",
            dtype="float32",
            max_model_len=FLEET_MODEL.max_positions,
            max_num_seqs=SEQUENCES,
            stream_interval=4,
            extra_args=REPLICA_ARGS if self.role.is_replica else STOCK_ARGS,
            extra_env={"CUDA_VISIBLE_DEVICES": ""},
        )
        return ChaosReplica(spec, self.http)

    def _gateway(self, number: int) -> GatewayProcess:
        port = free_port()
        replicas = [f"--replica={r.spec.name}=dedicated={r.spec.url}" for r in self.replicas]
        argv = [sys.executable, "-m", "rose.main.gateway", f"--port={port}", *replicas]
        argv += [f"--replica-max-sequences={SEQUENCES}", "--max-attempts=64", *self.gateway_options]
        return GatewayProcess(argv, port, self.folder / f"gateway-{number}.log")

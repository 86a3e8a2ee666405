"""Gateways as processes of their own, which can be killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.fakes.replica import StandInReplica
from tests.harness.processes import Forked


@dataclass
class GatewayProcess:
    """One that listens under `url`."""

    process: Forked
    url: str

    async def kill(self) -> None:
        """`kill -9`; returns when it is gone."""
        await asyncio.to_thread(self.process.end)


@asynccontextmanager
async def gateway_process(*replicas: StandInReplica) -> AsyncIterator[GatewayProcess]:
    """`rose gateway --replica …` over these replicas, which answers already."""
    options: list[str] = []
    for number, replica in enumerate(replicas):
        options += ["--replica", f"ded-{number}=dedicated={replica.url}"]
    process = Forked("-m", "rose.main.gateway", "--port", "0", *options, stdout=True)
    gateway = GatewayProcess(process, (await process.line()).split()[-1])
    try:
        yield gateway
    finally:
        await gateway.kill()

"""Gateways as processes of their own, which can be killed."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from standin_replica import StandInReplica


@dataclass
class GatewayProcess:
    """One that listens under `url`."""

    process: asyncio.subprocess.Process
    url: str

    async def kill(self) -> None:
        """`kill -9`; returns when it is gone."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def gateway_process(*replicas: StandInReplica) -> AsyncIterator[GatewayProcess]:
    """`rose gateway --replica …` over these replicas, which answers already."""
    command = [sys.executable, "-m", "rose.gateway.main", "--port", "0"]
    for number, replica in enumerate(replicas):
        command += ["--replica", f"ded-{number}=dedicated={replica.url}"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    assert process.stdout is not None
    said = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
    gateway = GatewayProcess(process, said.split()[-1])
    try:
        yield gateway
    finally:
        await gateway.kill()

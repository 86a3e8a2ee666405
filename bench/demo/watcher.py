"""Watcher of a run: reads the state of the control plane and of the gateway."""

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc

from rose.errors import UnavailableError
from rose.rpc import rose_pb2, rose_pb2_grpc

CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """Counters of the gateway; all but `live_turns` and `waiting` only grow."""

    tokens: dict[str, int] = field(default_factory=dict)
    live_turns: dict[str, int] = field(default_factory=dict)
    continuations: int = 0


class Watcher:
    """Asks the scheduler and the gateway; raises UnavailableError when one is silent."""

    def __init__(self, scheduler: str, gateway_url: str) -> None:
        self._channel = grpc.aio.insecure_channel(scheduler)
        self._scheduler = rose_pb2_grpc.SchedulerStub(self._channel)
        self._gateway_url = gateway_url
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        self._http = aiohttp.ClientSession(timeout=timeout)

    async def snapshot(self) -> rose_pb2.SnapshotReply:
        """The scheduler's view of everything."""
        try:
            return await self._scheduler.Snapshot(
                rose_pb2.SnapshotRequest(), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the scheduler does not answer: {error.details()}") from error

    async def harvest(self, mode: rose_pb2.HarvestMode.ValueType) -> None:
        """Let guests be leased, or not."""
        request = rose_pb2.SetHarvestRequest(mode=mode)
        await self._scheduler.SetHarvest(request, timeout=CALL_TIMEOUT_S)

    async def revoke(self, replica: str, reason: str) -> int:
        """Take a replica's lease; returns the epoch that ended."""
        request = rose_pb2.RevokeRequest(replica=replica, reason=reason)
        reply = await self._scheduler.Revoke(request, timeout=CALL_TIMEOUT_S)
        return reply.epoch

    async def gateway(self) -> GatewayFigures:
        try:
            async with self._http.get(f"{self._gateway_url}/rose/v1/stats") as response:
                body: dict[str, Any] = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"the gateway does not answer: {error!r}") from error
        return GatewayFigures(body["tokens"], body["live_turns"], body["continuations"])

    async def aclose(self) -> None:
        await self._http.close()
        await self._channel.close(None)


def replica_of(snapshot: rose_pb2.SnapshotReply, name: str) -> rose_pb2.Replica | None:
    """One replica of a snapshot."""
    return next((replica for replica in snapshot.replicas if replica.id == name), None)

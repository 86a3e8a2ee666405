"""A stand-in scheduler: one table of dedicated replicas, whose leases end one after the other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server


class LeasingScheduler(SchedulerServicer):
    """Every `renew_s` one replica's lease ends and it has a new one; 0: never."""

    def __init__(self, ports: Sequence[int], renew_s: float = 0.0) -> None:
        self._epochs = dict.fromkeys(ports, 1)
        self.renew_s = renew_s
        self.renewed = 0
        self._server = make_server()
        add_SchedulerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> "LeasingScheduler":
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.stop(0.1)

    async def WatchReplicas(  # noqa: N802 - gRPC's name
        self,
        request: Any,  # noqa: ANN401 - pb.WatchReplicasRequest
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.ReplicaTable]:
        """Tables, for as long as anybody listens."""
        del request, context
        while True:
            yield self._table()
            await asyncio.sleep(self.renew_s or 1.0)
            if self.renew_s:
                port = list(self._epochs)[self.renewed % len(self._epochs)]
                self._epochs[port] += 1
                self.renewed += 1

    async def ReportDemand(  # noqa: N802 - gRPC's name
        self, request: pb.DemandReport, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DemandReply:
        """Demand is of no interest."""
        del request, context
        return pb.DemandReply()

    def _table(self) -> pb.ReplicaTable:
        rows = [
            pb.Replica(
                id=f"own-{port}",
                kind=pb.REPLICA_KIND_DEDICATED,
                url=f"http://127.0.0.1:{port}",
                leased=True,
                lease_epoch=epoch,
                healthy=True,
                max_sequences=64,
                decode_tok_s=100_000.0,
                prefill_tok_s=1_000_000.0,
            )
            for port, epoch in self._epochs.items()
        ]
        return pb.ReplicaTable(replicas=rows)

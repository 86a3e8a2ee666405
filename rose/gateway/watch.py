"""Replica table from the scheduler: pushed over gRPC, forgotten when the scheduler stays silent.

Demand goes back over the same connection: a new scheduler hears of it as soon as it is found.

The last table serves on for `ttl_s` after its arrival, the time for which a lease would live; then
every replica counts as revoked.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import grpc

from elastic_scheduler import ReplicaKind
from rose.gateway.dispatcher import EventSink
from rose.gateway.reporting import DemandReporter
from rose.gateway.table import ReplicaEntry, TableSink
from rose.rpc import rose_pb2, rose_pb2_grpc

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
KINDS = {
    rose_pb2.REPLICA_KIND_GUEST: ReplicaKind.GUEST,
    rose_pb2.REPLICA_KIND_DEDICATED: ReplicaKind.DEDICATED,
}


class WatchedTable:
    """Follows `WatchReplicas` of one scheduler, reconnecting with backoff."""

    def __init__(
        self,
        target: str,
        name: str,
        ttl_s: float,
        on_event: EventSink,
        clock: Callable[[], float] = time.monotonic,
        reporter: DemandReporter | None = None,
    ) -> None:
        self._target = target
        self._reporter = reporter
        self._name = name
        self._ttl_s = ttl_s
        self._on_event = on_event
        self._clock = clock
        self._received_s = clock()
        self._connected = False

    async def run(self, sink: TableSink) -> None:
        """Hand every table to `sink`, an empty one once the last is too old; until cancelled."""
        backoff_s = BACKOFF_FIRST_S
        expiry = asyncio.create_task(self._expire(sink))
        try:
            while True:
                if await self._follow(sink):
                    backoff_s = BACKOFF_FIRST_S
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
        finally:
            expiry.cancel()

    async def _follow(self, sink: TableSink) -> bool:
        """Read one stream to its end; whether it brought a table."""
        brought = False
        async with grpc.aio.insecure_channel(self._target) as channel:
            stub = rose_pb2_grpc.SchedulerStub(channel)
            call = stub.WatchReplicas(rose_pb2.WatchReplicasRequest(gateway=self._name))
            async with self._reporting(stub):
                try:
                    while True:
                        # A live scheduler sends every second: silence is a lost connection.
                        # (`wait_for` of Python 3.11 can swallow a cancellation; `timeout` cannot.)
                        async with asyncio.timeout(self._ttl_s):
                            table = await call.read()
                        if not isinstance(table, rose_pb2.ReplicaTable):
                            break
                        brought = True
                        self._note(sink, table)
                except (grpc.aio.AioRpcError, TimeoutError) as error:
                    self._lost(str(getattr(error, "details", lambda: "silent")()))
        return brought

    @contextlib.asynccontextmanager
    async def _reporting(self, stub: "rose_pb2_grpc.SchedulerAsyncStub") -> AsyncIterator[None]:
        """Report demand for as long as this connection is watched.

        A report that cannot even be made ends the watch: without demand nothing would be leased.
        """
        if self._reporter is None:
            yield
            return
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._reporter.run(stub))
            try:
                yield
            finally:
                task.cancel()

    def _note(self, sink: TableSink, table: rose_pb2.ReplicaTable) -> None:
        self._received_s = self._clock()
        if not self._connected:
            self._connected = True
            self._on_event("scheduler_connected", scheduler=self._target)
        sink(tuple(_entry(row) for row in table.replicas if row.kind in KINDS))

    def _lost(self, why: str) -> None:
        if self._connected:
            self._connected = False
            self._on_event("scheduler_lost", scheduler=self._target, reason=why)

    async def _expire(self, sink: TableSink) -> None:
        while True:
            age_s = self._clock() - self._received_s
            if age_s >= self._ttl_s:
                sink(())
                age_s = 0.0
            await asyncio.sleep(self._ttl_s - age_s)


def _entry(row: rose_pb2.Replica) -> ReplicaEntry:
    return ReplicaEntry(
        id=row.id,
        kind=KINDS[row.kind],
        url=row.url,
        leased=row.leased,
        lease_epoch=row.lease_epoch,
        healthy=row.healthy,
        policy_version=row.policy_version,
        max_sequences=row.max_sequences,
        kv_tokens=row.kv_tokens,
        decode_tok_s=row.decode_tok_s,
        prefill_tok_s=row.prefill_tok_s,
    )

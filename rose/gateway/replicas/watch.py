"""Replica table from the scheduler: pushed over gRPC, dropped when the scheduler stays silent.

Demand goes back over the same connection: a new scheduler gets it as soon as it is found.

    known ── ttl_s old ──► held: no new turn is placed, live ones continue
                             │ ttl_s in which a newer one could have been read
                             └──► over: every replica counts as revoked

A new leader says so until it has heard from all nodes: rows that its table lacks stay as they were.
The last table serves for `ttl_s`, the time for which a lease would live. Usually all three are one
moment. But a pause of this process says nothing about the scheduler, whose tables are read after
it: live turns are given up only when there was time for that.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

import grpc

from elastic_scheduler import ReplicaKind
from rose.addresses import checked_url
from rose.errors import ConfigError, UnavailableError
from rose.gateway.demand import DemandReporter
from rose.gateway.replicas.dispatcher import EventSink
from rose.gateway.replicas.jobs import JobVersions
from rose.gateway.replicas.table import ReplicaEntry, TableSink
from rose.rpc import rose_pb2, rose_pb2_grpc
from rose.rpc.leader_channel import LeaderChannel
from rose.rpc.silence import Silence, read_unless_silent
from rose.security.certificates import CertificateFiles

ROWS_NOTED = 256
KINDS = {
    rose_pb2.REPLICA_KIND_GUEST: ReplicaKind.GUEST,
    rose_pb2.REPLICA_KIND_DEDICATED: ReplicaKind.DEDICATED,
}


def _unheard(versions: Mapping[str, JobVersions]) -> None:
    del versions


class WatchedTable:
    """Source of the replica table that follows the leading scheduler's `WatchReplicas` stream, and
    connects again after a pause.

    target: HOST:PORT, several with commas; an invalid one raises `ConfigError`.
    """

    def __init__(
        self,
        target: str,
        name: str,
        ttl_s: float,
        on_event: EventSink,
        clock: Callable[[], float] = time.monotonic,
        reporter: DemandReporter | None = None,
        certificates: CertificateFiles | None = None,
        on_versions: Callable[[Mapping[str, JobVersions]], None] = _unheard,
    ) -> None:
        """Prepare the source without connecting.

        ttl_s: seconds for which a table is valid. reporter: sends demand over the same connection.
        on_versions: called with each job's versions before each table.
        """
        self._leader = LeaderChannel(target, certificates=certificates)
        self._reporter = reporter
        self._on_versions = on_versions
        self._name = name
        self._ttl_s = ttl_s
        self._on_event = on_event
        self._clock = clock
        self._silence = Silence(ttl_s, clock)
        self._connected = False
        self._noted: set[str] = set()
        self._entries: tuple[ReplicaEntry, ...] = ()
        self._jobs: tuple[str, ...] = ()

    async def run(self, sink: TableSink) -> None:
        """Pass every table to `sink` until cancelled: with all replicas unhealthy once the last
        table is `ttl_s` old, and an empty one later or after an error.
        """
        try:
            # The end of one ends the other: a table without a watch must expire.
            async with asyncio.TaskGroup() as group:
                group.create_task(self._expire(sink))
                while True:
                    self._leader.missed(await self._follow(sink))
                    await asyncio.sleep(self._leader.pause_s)
        except Exception:
            # After any error no lease is known to hold until this runs again.
            sink((), self._jobs)
            raise
        finally:
            await self._leader.close()

    async def _follow(self, sink: TableSink) -> Exception | None:
        """Read one stream to its end and return its error, None if it ended without one.

        A live leader sends every second: silence for half of a table's life ends the stream, and
        the other half is left to find the next leader.
        """
        try:
            stub = rose_pb2_grpc.SchedulerStub(await self._leader.connected())
        except UnavailableError as error:
            self._lost(str(error))
            return error
        call = stub.WatchReplicas(rose_pb2.WatchReplicasRequest(gateway=self._name))
        async with self._reporting(stub):
            try:
                while True:
                    table = await read_unless_silent(call.read(), self._ttl_s / 2, self._clock)
                    if not isinstance(table, rose_pb2.ReplicaTable):
                        return None
                    self._leader.answered()
                    self._note(sink, table)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                self._lost(str(getattr(error, "details", lambda: "silent")()))
                return error
            finally:
                call.cancel()

    @contextlib.asynccontextmanager
    async def _reporting(self, stub: "rose_pb2_grpc.SchedulerAsyncStub") -> AsyncIterator[None]:
        """Return a context manager that reports demand while the stream is read.

        A report that cannot be built ends the watch: without demand nothing would be leased.
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
        self._silence.heard()
        if not self._connected:
            self._connected = True
            self._on_event("scheduler_connected", scheduler=self._leader.address)
        entries = [entry_of(row) for row in table.replicas if self._is_replica(row)]
        if table.settling:
            named = {row.id for row in table.replicas}
            entries += [each for each in self._entries if each.id not in named]
        self._entries = tuple(entries)
        self._jobs = tuple(row.job for row in table.jobs)
        self._on_versions(
            {row.job: JobVersions(row.latest_version, row.max_staleness) for row in table.jobs}
        )
        # One that waited for a paused process may be older than a lease.
        sink(self._held if self._silence.outdated else self._entries, self._jobs)

    @property
    def _held(self) -> tuple[ReplicaEntry, ...]:
        return tuple(replace(entry, healthy=False) for entry in self._entries)

    def _is_replica(self, row: rose_pb2.Replica) -> bool:
        """Return True if the row has a valid URL and a known kind; an invalid URL is logged once
        for each replica.
        """
        try:
            checked_url(row.url, f"the url of replica {row.id[:80]!r}")
        except ConfigError as error:
            if row.id not in self._noted and len(self._noted) < ROWS_NOTED:
                self._noted.add(row.id)
                self._on_event("replica_refused", reason=str(error))
            return False
        return row.kind in KINDS

    def _lost(self, why: str) -> None:
        if self._connected:
            self._connected = False
            self._on_event("scheduler_lost", scheduler=self._leader.address, reason=why)

    async def _expire(self, sink: TableSink) -> None:
        silence, held, over = self._silence, False, False
        while True:
            silence.look()
            if silence.too_long and not over:
                sink((), self._jobs)
            elif silence.outdated and not held:
                sink(self._held, self._jobs)
            held, over = silence.outdated, silence.too_long
            await asyncio.sleep(silence.look_s)


def entry_of(row: rose_pb2.Replica) -> ReplicaEntry:
    """Return a row of the scheduler's table as a ReplicaEntry; weights of another job count as
    version 0.
    """
    return ReplicaEntry(
        id=row.id,
        kind=KINDS[row.kind],
        url=row.url,
        leased=row.leased,
        lease_epoch=row.lease_epoch,
        healthy=row.healthy,
        # A version number of another job's weights means nothing here: this job's turns see version
        # 0.
        policy_version=row.policy_version if row.held_job in ("", row.job) else 0,
        max_sequences=row.max_sequences,
        kv_tokens=row.kv_tokens,
        decode_tok_s=row.decode_tok_s,
        prefill_tok_s=row.prefill_tok_s,
        job=row.job,
    )

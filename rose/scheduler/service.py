"""The gRPC shell of the core: streams in, streams out, one step at a time."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from typing_extensions import override

from rose.errors import ConfigError, RefusedError, RoseError
from rose.eventlog import EventLog
from rose.rpc import rose_pb2 as pb
from rose.rpc.rose_pb2_grpc import SchedulerServicer
from rose.scheduler.core import SchedulerCore
from rose.scheduler.mailbox import CommandQueue, TableSlot
from rose.scheduler.messages import (
    Action,
    Answer,
    Attached,
    CloseStream,
    Command,
    Detached,
    Event,
    HarvestSet,
    JobRegistered,
    Persist,
    PublishTable,
    Record,
    RevokeAsked,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.wire import demanded, event_of, mode_of
from rose.store import Store

PROTOCOL = 1
TICK_S = 0.1


class SchedulerService(SchedulerServicer):
    """Feeds the core and carries out its actions, all on one event loop.

    Store writes happen on the loop: they are rare and small, and nobody may be told before they
    are durable. When one fails, nothing more is sent and `tick` ends with the error: leases run out
    by themselves.
    """

    def __init__(self, core: SchedulerCore, store: Store, events: EventLog) -> None:
        self._core = core
        self._store = store
        self._events = events
        self._streams = itertools.count(1)
        self._queues: dict[int, CommandQueue] = {}
        self._watchers: set[TableSlot] = set()
        self._table = pb.ReplicaTable()
        self._failure: RoseError | None = None

    async def tick(self) -> None:
        """Until cancelled: let time pass for the core. Raises the store's error when it fails."""
        while self._failure is None:
            self._step(Tick())
            await asyncio.sleep(TICK_S)
        raise self._failure

    def close(self) -> None:
        """End all streams, so that none is cut off when the server stops."""
        for queue in self._queues.values():
            queue.close("the scheduler stops; attach again")
        for slot in self._watchers:
            slot.put(None)

    # ---- nodes ----

    @override
    async def Attach(  # type: ignore[override]  # a coroutine: it surely ends with its peer
        self,
        request_iterator: AsyncIterator[pb.NodeReport],
        context: "grpc.aio.ServicerContext[pb.NodeReport, pb.NodeCommand]",
    ) -> None:
        """One node's stream, for as long as the node and this process live."""
        first = await self._hello(request_iterator, context)
        node, hello = first.node, first.hello
        stream = next(self._streams)
        queue = self._queues[stream] = CommandQueue()
        reader: asyncio.Task[None] | None = None
        try:
            self._step(Attached(node, stream, hello.cluster, hello.relay_url))
            reader = asyncio.create_task(self._read(request_iterator, node, stream, queue))
            while (command := await queue.get()) is not None:
                await context.write(command)
            if reader.done():
                reader.result()  # an error of reading is an error of this call
            if queue.closed:
                await context.abort(grpc.StatusCode.ABORTED, queue.closed)
        finally:
            if reader is not None:
                reader.cancel()
            del self._queues[stream]
            self._step(Detached(stream))

    async def _hello(
        self,
        reports: AsyncIterator[pb.NodeReport],
        context: "grpc.aio.ServicerContext[pb.NodeReport, pb.NodeCommand]",
    ) -> pb.NodeReport:
        first = await anext(aiter(reports), None)
        if first is None or not first.node or not first.HasField("hello"):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the first report must be a hello with a node name",
            )
        assert first is not None
        if first.hello.protocol != PROTOCOL:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol {first.hello.protocol} is not {PROTOCOL}; run one version of ROSE",
            )
        return first

    async def _read(
        self, reports: AsyncIterator[pb.NodeReport], node: str, stream: int, queue: CommandQueue
    ) -> None:
        reason = "the node ended its stream"
        try:
            async for report in reports:
                if report.node != node:
                    reason = f"a stream of node {node} carried a report of {report.node!r}"
                    break
                event = event_of(report, stream)
                if event is not None:
                    self._step(event)
        finally:
            queue.close(reason)

    # ---- gateways ----

    @override
    async def WatchReplicas(  # type: ignore[override]  # a coroutine, as Attach is
        self,
        request: pb.WatchReplicasRequest,
        context: "grpc.aio.ServicerContext[pb.WatchReplicasRequest, pb.ReplicaTable]",
    ) -> None:
        """The newest table, on every change and each second."""
        slot = TableSlot()
        self._watchers.add(slot)
        slot.put(self._table)
        try:
            while (table := await slot.get()) is not None:
                await context.write(table)
        finally:
            self._watchers.discard(slot)

    @override
    async def ReportDemand(
        self, request: pb.DemandReport, context: "grpc.aio.ServicerContext[object, object]"
    ) -> pb.DemandReply:
        """A gateway says what its turns need."""
        try:
            self._step(demanded(request))
        except ConfigError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.DemandReply()

    # ---- trainers and operators ----

    @override
    async def RegisterJob(
        self, request: pb.RegisterJobRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> pb.RegisterJobReply:
        """A trainer asks for capacity."""
        event = JobRegistered(request.job, request.max_staleness)
        return pb.RegisterJobReply(latest_version=await self._answer(event, context))

    @override
    async def AnnounceVersion(
        self,
        request: pb.AnnounceVersionRequest,
        context: "grpc.aio.ServicerContext[object, object]",
    ) -> pb.AnnounceVersionReply:
        """A trainer published a version."""
        event = VersionAnnounced(request.job, request.version, request.parent, request.url)
        return pb.AnnounceVersionReply(nodes=await self._answer(event, context))

    @override
    async def SetHarvest(
        self, request: pb.SetHarvestRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> pb.SetHarvestReply:
        """An operator opens or closes the harvest."""
        try:
            event = HarvestSet(mode_of(request.mode), request.replica or None)
        except ConfigError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.SetHarvestReply(released=await self._answer(event, context))

    @override
    async def Revoke(
        self, request: pb.RevokeRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> pb.RevokeReply:
        """An operator ends a lease."""
        event = RevokeAsked(request.replica, request.reason)
        return pb.RevokeReply(epoch=await self._answer(event, context))

    @override
    async def Snapshot(
        self, request: pb.SnapshotRequest, context: "grpc.aio.ServicerContext[object, object]"
    ) -> pb.SnapshotReply:
        """Everything an operator may ask about."""
        return self._core.snapshot(time.monotonic())

    async def _answer(
        self, event: Event, context: "grpc.aio.ServicerContext[object, object]"
    ) -> int:
        try:
            value = self._step(event)
        except RefusedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ConfigError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if value is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler's store failed")
        assert value is not None
        return value

    # ---- actions ----

    def _step(self, event: Event) -> int | None:
        """Feed the core; returns its answer. Raises the core's `RefusedError` and `ConfigError`."""
        if self._failure is not None:
            return None
        try:
            return self._carry_out(self._core.step(event, time.monotonic()))
        except (RefusedError, ConfigError):
            raise
        except RoseError as error:
            self._failure = error
            return None

    def _carry_out(self, actions: list[Action]) -> int | None:
        answer = None
        for action in actions:
            match action:
                case Answer():
                    answer = action.value
                case Persist():
                    self._persist(action)
                case Record():
                    self._events.write(action.event, **action.fields)
                case _:
                    self._tell(action)
        return answer

    def _tell(self, action: Command | CloseStream | PublishTable) -> None:
        match action:
            case PublishTable():
                self._table = action.table
                for slot in self._watchers:
                    slot.put(action.table)
            case Command():
                if action.stream in self._queues:
                    self._queues[action.stream].put(action.command)
            case CloseStream():
                if action.stream in self._queues:
                    self._queues[action.stream].close(action.reason)

    def _persist(self, action: Persist) -> None:
        if action.value is None:
            self._store.delete(action.key)
        else:
            self._store.put(action.key, action.value)

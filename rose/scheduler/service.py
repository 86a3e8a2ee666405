"""The gRPC shell of the core: streams in, streams out, one step at a time.

An invalid message ends its peer's own stream or call, with one line as the reason and an event. Any
other error ends the stream or call that was being handled, and never the process.

`LeaderHandlers` answers by the service of the term that this process leads. As a standby it answers
every call UNAVAILABLE, with the trailing metadata `rose-leader: HOST:PORT` (empty while it knows of
none). Such a call was surely not carried out, so it may be made again elsewhere.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from typing_extensions import override

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy
from elastic_scheduler.leases.lease_table import stricter
from rose.errors import ConfigError, RefusedError, RunFencedError, RunHeldError, UnavailableError
from rose.logs.eventlog import EventLog
from rose.release import release
from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LEADER_METADATA
from rose.rpc.rose_pb2_grpc import SchedulerServicer
from rose.scheduler import wire
from rose.scheduler.core.messages import (
    Action,
    Answer,
    CloseStream,
    Command,
    Detached,
    Event,
    HarvestSet,
    LogRecord,
    ObjectsHeard,
    PublishTable,
    QuotasHeard,
    Reserve,
    Save,
    StoredEvent,
    Tick,
)
from rose.scheduler.core.observed import Observed, PolicyView
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.lease_spans import LeaseSpans
from rose.scheduler.persistence import STOP, StoreWriter, stop_of
from rose.security.rpc_access import CALLING
from rose.store import ABSENT, LeadershipLostError, Store
from rose.tracing import NO_SPANS, Spans, TraceContext, trace_of

PROTOCOL = 2
TICK_S = 0.1
HEARTBEAT_S = 1.0
# After a tick that broke: its cause is likely still there.
BROKEN_TICK_S = 1.0
# The stop is watched for again after this where the store does not answer.
STOP_RETRY_S = 0.5
HELLO_S = 10.0
MAX_WATCHERS = 1_024
# Bounds on how long a caller waits for the store, and on the callers that wait.
ANSWER_S = 5.0
MAX_COMMITS = 64

AuditSink = Callable[[str, dict[str, object], str], None]
"""Function that takes an event, its fields, and the name of its caller."""
LEADS_NO_MORE = "this scheduler leads no more; ask the one that does"
BROKEN = "the scheduler could not handle this; see its events"
# Far more than a version chain: a node this far behind attaches anew and gets all of it again.
COMMAND_LIMIT = 4_096
STANDBY = "this scheduler is a standby; ask the one that leads"
# Figures that follow from others, and complaints of the process about itself, which may repeat.
UNAUDITED = frozenset({"health_changed", "first_token", "policy_broken", "replica_broken"})
Context = grpc.aio.ServicerContext
# Trace context of the trainer's call that is being carried out.
_ASKED: Final[ContextVar[TraceContext | None]] = ContextVar("asked", default=None)
CODES = {
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    RefusedError: grpc.StatusCode.FAILED_PRECONDITION,
    RunHeldError: grpc.StatusCode.ALREADY_EXISTS,
    RunFencedError: grpc.StatusCode.ABORTED,
}


class CommandQueue:
    """Queue of commands for one node, in order; none is dropped: a full queue ends the stream."""

    def __init__(self, limit: int = COMMAND_LIMIT) -> None:
        self._queue: asyncio.Queue[pb.NodeCommand | None] = asyncio.Queue(limit + 1)
        self._limit = limit
        self.closed: str | None = None
        self.code = grpc.StatusCode.ABORTED

    def put(self, command: pb.NodeCommand) -> None:
        """Add a command; close the queue instead if the node is 4,096 commands behind."""
        if self.closed is None and self._queue.qsize() >= self._limit:
            self.close("the node does not take its commands; attach anew")
        elif self.closed is None:
            self._queue.put_nowait(command)

    def close(self, reason: str, code: grpc.StatusCode = grpc.StatusCode.ABORTED) -> None:
        """Close the queue: `get` returns the commands already in it, then None."""
        if self.closed is None:
            self.closed, self.code = reason, code
            self._queue.put_nowait(None)

    @property
    def waiting(self) -> int:
        """Number of commands that the node has not taken yet."""
        return self._queue.qsize()

    async def get(self) -> pb.NodeCommand | None:
        """Wait for and return the next command, None once the queue is closed and empty."""
        return await self._queue.get()


class TableSlot:
    """Newest replica table for one watching gateway; older ones not taken are dropped."""

    def __init__(self) -> None:
        self._table: pb.ReplicaTable | None = None
        self._fresh = asyncio.Event()

    def put(self, table: pb.ReplicaTable | None) -> None:
        """Replace the table that waits to be taken; None ends the watch."""
        self._table = table
        self._fresh.set()

    async def get(self) -> pb.ReplicaTable | None:
        """Wait for a table not returned yet, and return it; None at the end of the watch."""
        await self._fresh.wait()
        self._fresh.clear()
        return self._table


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """Fleet snapshot, and lengths of the service's queues.

    watchers: gateways that watch the table. commands: commands that nodes have not taken yet,
    longest: those of the longest queue. commits: requests that wait for the store. stalled_s:
    seconds for which a write has waited, 0 while that is normal.
    """

    core: Observed
    watchers: int = 0
    commands: int = 0
    longest: int = 0
    commits: int = 0
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Clocks of a service, its longest wait for the store, and the period of its ticks.

    clock: monotonic seconds for the core. wall_clock: Unix seconds for blackout windows.
    """

    answer_s: float = ANSWER_S
    tick_s: float = TICK_S
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time


def _call(reply_of: Callable[[int], Message]) -> Any:  # noqa: ANN401 - a method of the servicer
    """Return the gRPC method of a request that is one event; `reply_of` makes its reply."""

    async def call(
        self: "SchedulerService", request: Message, context: "Context[object, object]"
    ) -> Message:
        return reply_of(await self._answer(request, context))

    return call


class SchedulerService(SchedulerServicer):
    """gRPC servicer of a leading scheduler: feeds the core and carries out its actions.

    All runs on one event loop. A caller whose request must be durable is answered once it is; while
    the store does not answer, no lease is granted and live leases are renewed.
    """

    def __init__(
        self,
        core: SchedulerCore,
        store: Store,
        events: EventLog,
        troubles: Callable[[], Iterable[str]] = tuple,
        leads: Callable[[], bool] = lambda: True,
        audit: AuditSink = lambda event, fields, by: None,
        times: ServiceTimes | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:
        """Begin a term. leads: returns True while this process surely leads; else no step is taken.

        troubles: returns faults of the process, a line each. audit: takes decisions for the audit
        log.
        """
        self._leads = leads
        times = times or ServiceTimes()
        self._clock = times.clock
        self._wall_clock = times.wall_clock
        self._tick_s = times.tick_s
        self._audit = audit
        self._lease_spans = LeaseSpans(spans)
        self._troubles = troubles
        self._core = core
        self._store = store
        self._writer = StoreWriter(store, self._note)
        self._events = events
        self._answer_s = times.answer_s
        self._streams = itertools.count(1)
        self._queues: dict[int, CommandQueue] = {}
        # In order, so that a history can be repeated.
        self._watchers: dict[TableSlot, None] = {}
        self._table: pb.ReplicaTable | None = None
        # Requests change the store in the order in which they came.
        self._order = asyncio.Lock()
        self._commits: set[asyncio.Task[int | None]] = set()
        self._reservations: set[asyncio.Task[None]] = set()
        self._closings = self._begun = 0
        self._door = asyncio.Lock()
        # Streams on which something was sent since the last beat.
        self._told: set[int] = set()
        # Blackout windows hang on the wall clock: no node may attach before the core knows it.
        self._step(Tick(self._wall_clock()))

    async def tick(self) -> None:
        """Feed the core a tick every 0.1 s and send heartbeats each second, until cancelled.

        A tick that raises is logged, and the next follows after a second.
        """
        beat_s = self._clock()
        while True:
            self._writer.check()
            try:
                self._step(Tick(self._wall_clock()))
                if self._clock() >= beat_s:
                    beat_s = self._clock() + HEARTBEAT_S
                    self._beat()
            except LeadershipLostError:
                await asyncio.sleep(BROKEN_TICK_S)  # the end of the term is under way
            except Exception as error:  # noqa: BLE001 - leases must go on; recorded, with a pause
                self._complain("tick_broken", "tick", repr(error))
                await asyncio.sleep(BROKEN_TICK_S)
            await asyncio.sleep(self._tick_s)

    def figures(self, *, budgets: bool = True) -> ServiceFigures:
        """Return the fleet and the queues' lengths now, with SLO budgets if `budgets`."""
        queues = [queue.waiting for queue in self._queues.values()]
        return ServiceFigures(
            self.observed(budgets=budgets),
            watchers=len(self._watchers),
            commands=sum(queues),
            longest=max(queues, default=0),
            commits=len(self._commits),
            stalled_s=self._writer.stalled_s,
        )

    async def ask(self, event: StoredEvent, by: str) -> int:
        """Carry out a request of this process itself; return its answer once it is durable.

        by: name of the requester for the audit log. Raises the core's `RefusedError` and
        `ConfigError`, TimeoutError while the store does not answer, LeadershipLostError.
        """
        # The audit log records all consequences under that name.
        CALLING.set(by)
        value = await asyncio.wait_for(asyncio.shield(self._begin(event)), self._answer_s)
        assert value is not None
        return value

    def objects_heard(
        self, heard_s: float, refused: frozenset[str], labels: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Tell the core that policies match the Kubernetes objects of `heard_s`, by its clock.

        refused: names of invalid objects. labels: those that were asked for, by node.
        """
        self._step(ObjectsHeard(heard_s, refused, labels))

    def quotas_heard(self, heard_s: float, pods: Mapping[str, int]) -> None:
        """Tell the core how many placeholder pods of jobs ran at `heard_s`, by its clock."""
        self._step(QuotasHeard(heard_s, pods))

    def lendable(self) -> dict[str, int]:
        """Return the number of guests that may be lent now, by node; nodes without are left out."""
        return self._core.lendable(self._clock())

    def policies_in_force(self) -> tuple[dict[str, CapacityPolicy], frozenset[str]]:
        """Return all capacity policies by name, and the names of those of Kubernetes objects."""
        capacity = self._core.capacity
        return {policy.name: policy for policy in capacity.gate.policies}, capacity.of_objects

    def policy_views(self) -> dict[str, PolicyView]:
        """Return the status of each capacity policy on its nodes, by policy name."""
        return self._core.policy_views(self._clock())

    def observed(self, *, budgets: bool = True) -> Observed:
        """Return an immutable snapshot of the fleet, with SLO budgets if `budgets`."""
        return self._core.observed(self._clock(), budgets=budgets)

    def troubles(self) -> list[str]:
        """Return the process's faults, a line each, among them a store that takes no write."""
        stalled_s = self._writer.stalled_s
        stalled = [f"the store has answered no write for {stalled_s:.0f} s"] if stalled_s else []
        return [*stalled, *self._troubles()]

    def refused(self, who: str, method: str, reason: str) -> None:
        """Log a call that its caller's certificate did not allow."""
        self._complain("call_refused", who, f"{method}: {reason}")

    async def watch_stop(self) -> None:
        """Follow the operator's stop in the store until cancelled, whoever wrote it there.

        A change that the store reports may be older than this scheduler's own requests, so the
        present value is read while no request is under way.
        """
        seen = ABSENT
        while True:
            with suppress(UnavailableError):
                since = await self._store.list(STOP)
                seen = await self._obey_stored(seen)
                async with aclosing(self._store.watch(since)) as changes:
                    async for change in changes:
                        if change.key == STOP:
                            seen = await self._obey_stored(seen)
            await asyncio.sleep(STOP_RETRY_S)

    async def _obey_stored(self, seen: int) -> int:
        """Apply the stored stop unless it is of revision `seen`; return its revision."""
        while True:
            if self._commits:
                await asyncio.wait(self._commits)
            begun = self._begun
            entry = await self._store.get(STOP)
            if self._begun == begun and not self._commits:
                break
        if entry is None or entry.revision == seen:
            return seen
        self._obey_stop(stop_of(entry.value), first=seen == ABSENT)
        return entry.revision

    def _obey_stop(self, mode: HarvestMode, *, first: bool) -> None:
        now = self._core.capacity.stop.mode
        # The first value was read at the start; a request may have come meanwhile.
        if mode is now or (first and stricter(mode, now) is now):
            return
        self._closings += mode is not HarvestMode.ACTIVE
        self._note("stop_read", mode=mode.value)
        self._step(HarvestSet(mode, None, opens=False))

    def _beat(self) -> None:
        """Send an empty command to each node that was sent nothing since the last beat.

        A node that receives nothing looks for another leader.
        """
        for stream in self._queues.keys() - self._told:
            self._queues[stream].put(pb.NodeCommand())
        self._told.clear()

    def close(self) -> None:
        """End all nodes' and gateways' streams, and cancel the writes under way."""
        for queue in self._queues.values():
            queue.close("the scheduler stops; attach again")
        for slot in self._watchers:
            slot.put(None)
        for task in (*self._commits, *self._reservations):
            task.cancel()
        self._lease_spans.close()

    # ---- nodes ----

    @override
    async def Attach(  # type: ignore[override]  # a coroutine: it surely ends with its peer
        self,
        request_iterator: AsyncIterator[pb.NodeReport],
        context: "Context[pb.NodeReport, pb.NodeCommand]",
    ) -> None:
        """Serve one node's stream until it ends: reports become events, commands are sent."""
        first = await self._hello(request_iterator, context)
        stream = next(self._streams)
        queue = self._queues[stream] = CommandQueue()
        reader: asyncio.Task[None] | None = None
        try:
            if await self._greet(queue, first, stream):
                reader = asyncio.create_task(
                    self._read(request_iterator, first.node, stream, queue)
                )
            while (command := await queue.get()) is not None:
                if not self._leads():
                    queue.close(LEADS_NO_MORE, grpc.StatusCode.UNAVAILABLE)
                    break
                await context.write(command)
            if reader is not None and reader.done():
                reader.result()  # an error of reading is an error of this call
            if queue.closed:
                await context.abort(queue.code, queue.closed)
        finally:
            if reader is not None:
                reader.cancel()
            del self._queues[stream]
            self._handle(queue, first.node, lambda: Detached(stream))

    async def _greet(self, queue: CommandQueue, first: pb.NodeReport, stream: int) -> bool:
        """Feed the core a node's hello; return False if the node is refused.

        One node is greeted in each turn of the loop: a thousand at once, as after a failover, would
        keep this process from renewing its lead.
        """
        async with self._door:
            greeted = self._handle(queue, first.node, lambda: wire.attached(first, stream))
            await asyncio.sleep(0)
        return greeted

    async def _hello(
        self,
        reports: AsyncIterator[pb.NodeReport],
        context: "Context[pb.NodeReport, pb.NodeCommand]",
    ) -> pb.NodeReport:
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(aiter(reports), None)
        except TimeoutError:
            first = None
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
                    reason = f"a stream of node {node} carried a report of {report.node[:40]!r}"
                    break
                if not self._handle(queue, node, lambda of=report: wire.event_of(of, stream)):  # type: ignore[misc]
                    break
        finally:
            queue.close(reason)

    def _handle(self, queue: CommandQueue, node: str, event_of: Callable[[], Event | None]) -> bool:
        """Take a step for a node's report; return False if that failed and closed the queue."""
        try:
            event = event_of()
            if event is not None:
                self._step(event)
        except LeadershipLostError as error:
            queue.close(str(error), grpc.StatusCode.UNAVAILABLE)
        except (ConfigError, RefusedError) as error:
            self._complain("peer_refused", node[:40], str(error))
            queue.close(str(error), CODES[type(error)])
        except Exception as error:  # noqa: BLE001 - whatever it is, one stream ends by it
            self._complain("peer_broken", node[:40], repr(error))
            queue.close(BROKEN, grpc.StatusCode.INTERNAL)
        else:
            return True
        return False

    # ---- gateways ----

    @override
    async def WatchReplicas(  # type: ignore[override]  # a coroutine, as Attach is
        self,
        request: pb.WatchReplicasRequest,
        context: "Context[pb.WatchReplicasRequest, pb.ReplicaTable]",
    ) -> None:
        """Stream the replica table to a gateway, on every change and each second."""
        if not self._leads():  # It was called in a term, and comes after its end.
            await context.abort(grpc.StatusCode.UNAVAILABLE, LEADS_NO_MORE)
        if len(self._watchers) >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} gateways watch; stop others"
            )
        slot = TableSlot()
        self._watchers[slot] = None
        if self._table is not None:
            slot.put(self._table)
        try:
            while (table := await slot.get()) is not None:
                await context.write(table)
        finally:
            self._watchers.pop(slot, None)

    ReportDemand = _call(lambda _: pb.DemandReply())

    # ---- trainers and operators ----

    @override
    async def RegisterJob(
        self, request: pb.RegisterJobRequest, context: "Context[object, object]"
    ) -> pb.RegisterJobReply:
        """Register a trainer's job; reply with its newest version and a run's longest silence."""
        latest = await self._answer(request, context)
        reply = pb.RegisterJobReply(latest_version=latest, run_ttl_s=self._core.runs.ttl_s)
        newest = self._core.newest(request.job)
        if newest is None:
            reply.dropped = latest > 0
        else:
            reply.latest_run, reply.latest_parent = newest.run, newest.parent
        return reply

    EndJob = _call(lambda released: pb.EndJobReply(released=released))
    AnnounceVersion = _call(lambda nodes: pb.AnnounceVersionReply(nodes=nodes))
    RenewRun = _call(lambda latest: pb.RenewRunReply(latest_version=latest))
    EndRun = _call(lambda _: pb.EndRunReply())
    DropJob = _call(lambda versions: pb.DropJobReply(versions=versions))
    SetHarvest = _call(lambda released: pb.SetHarvestReply(released=released))
    Revoke = _call(lambda epoch: pb.RevokeReply(epoch=epoch))
    DeletePolicy = _call(lambda _: pb.DeletePolicyReply())

    @override
    async def Snapshot(
        self, request: pb.SnapshotRequest, context: "Context[object, object]"
    ) -> pb.SnapshotReply:
        """Return the state of the fleet, of the store, and faults of this process."""
        reply = self._core.status(self._clock())
        reply.release = release()
        reply.store_stalled_s = self._writer.stalled_s
        reply.troubles.extend(self._troubles())
        return reply

    @override
    async def ApplyPolicy(
        self, request: pb.ApplyPolicyRequest, context: "Context[object, object]"
    ) -> pb.ApplyPolicyReply:
        """Put a capacity policy in force, or with dry_run only check it; reply what it changes."""
        if not request.dry_run:
            changed = await self._answer(request, context)
            return pb.ApplyPolicyReply(changed=bool(changed))
        try:
            outlook = self._core.outlook(wire.policy_applied(request), self._clock())
        except Exception as error:  # noqa: BLE001 - whatever it is, this call ends by it
            await self._refuse(error, "ApplyPolicy", context)
        return outlook

    @override
    async def ListPolicies(
        self, request: pb.ListPoliciesRequest, context: "Context[object, object]"
    ) -> pb.ListPoliciesReply:
        """Return all capacity policies in force."""
        return pb.ListPoliciesReply(policies=self._core.capacity.listed())

    @override
    async def ExplainPolicy(
        self, request: pb.ExplainPolicyRequest, context: "Context[object, object]"
    ) -> pb.ExplainPolicyReply:
        """Return, for one node or for all, the policy that decides each field."""
        try:
            nodes = self._core.explained(request.node, self._clock())
        except Exception as error:  # noqa: BLE001 - whatever it is, this call ends by it
            await self._refuse(error, "ExplainPolicy", context)
        return pb.ExplainPolicyReply(nodes=nodes)

    async def _answer(self, request: Message, context: "Context[object, object]") -> int:
        """Carry out a request and return its answer, once what must survive is durable.

        A failure ends the call with its gRPC status.
        """
        call = type(request).__name__
        _ASKED.set(trace_of(dict(context.invocation_metadata() or ())))
        try:
            event = wire.asked(request)
            if not isinstance(event, StoredEvent):
                return self._step(event) or 0
            # Not cancelled with its caller: a write that has begun must come to its end.
            value = await asyncio.wait_for(asyncio.shield(self._begin(event)), self._answer_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, this call ends by it
            await self._refuse(error, call.removesuffix("Request"), context)
        assert value is not None
        fields = MessageToDict(request, preserving_proto_field_name=True)
        self._audit(call, {**fields, "answer": value}, CALLING.get())
        return value

    def _begin(self, event: StoredEvent) -> "asyncio.Task[int | None]":
        """Return the task of a request: a stop takes effect at once, all else once it is durable.

        Raises TimeoutError while too many requests wait for the store.
        """
        closing = isinstance(event, HarvestSet) and event.mode is not HarvestMode.ACTIVE
        self._begun += 1
        released = self._step(event) if closing else None
        self._closings += closing
        if len(self._commits) >= MAX_COMMITS:
            raise TimeoutError
        task = asyncio.create_task(self._commit(event, released, self._closings))
        self._commits.add(task)
        task.add_done_callback(self._committed)
        return task

    def _committed(self, task: "asyncio.Task[int | None]") -> None:
        self._commits.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def _commit(self, event: StoredEvent, done: int | None, closings: int) -> int | None:
        async with self._order:
            await self._writer.write(self._core.writes(event))
            if done is not None:
                return done
            if isinstance(event, HarvestSet) and self._closings != closings:
                raise RefusedError("the harvest was closed meanwhile; open it again if it is meant")
            return self._step(event)

    async def _refuse(
        self, error: Exception, call: str, context: "Context[object, object]"
    ) -> NoReturn:
        """Abort one call with the gRPC status and line of an error; never returns."""
        if isinstance(error, TimeoutError):
            code, message = (
                grpc.StatusCode.UNAVAILABLE,
                ("the store takes no writes for now: this may still be done; ask again"),
            )
        elif isinstance(error, LeadershipLostError):
            code, message = grpc.StatusCode.UNAVAILABLE, str(error)
        elif isinstance(error, ConfigError | RefusedError):
            code, message = CODES[type(error)], str(error)
        else:
            code, message = grpc.StatusCode.INTERNAL, BROKEN
            self._complain("peer_broken", call, repr(error))
        await context.abort(code, message)
        raise AssertionError("abort returned")

    # ---- actions ----

    def _step(self, event: Event) -> int | None:
        """Feed the core an event and carry out its actions; return its answer, None without one.

        Raises the core's `RefusedError` and `ConfigError`, and LeadershipLostError if this process,
        as after a pause, does not surely lead.
        """
        if not self._leads():
            raise LeadershipLostError(LEADS_NO_MORE)
        return self._carry_out(self._core.step(event, self._clock()))

    def _complain(self, event: str, peer: str, reason: str) -> None:
        for record in self._core.complain(event, peer, reason[:200], self._clock()):
            self._write(record)

    def _note(self, event: str, **fields: object) -> None:
        self._write(LogRecord(event, fields))

    def _write(self, record: LogRecord) -> None:
        self._events.write(record.event, **record.fields)
        if record.event not in UNAUDITED:
            fields = dict(record.fields)
            if record.figures:
                fields["figures"] = dict(record.figures)
            self._audit(record.event, fields, CALLING.get())

    def _carry_out(self, actions: list[Action]) -> int | None:
        answer = None
        self._lease_spans.trace(actions, _ASKED.get())
        for action in actions:
            match action:
                case Answer():
                    answer = action.value
                case Reserve():
                    task = asyncio.create_task(self._reserve(action))
                    self._reservations.add(task)
                    task.add_done_callback(self._reservations.discard)
                case LogRecord():
                    self._write(action)
                case Save():
                    saving = asyncio.create_task(self._writer.write((action.write,)))
                    self._reservations.add(saving)
                    saving.add_done_callback(self._reservations.discard)
                case _:
                    self._tell(action)
        return answer

    async def _reserve(self, action: Reserve) -> None:
        try:
            await self._writer.write((action.write,))
            self._step(action.then)
        except LeadershipLostError:
            return
        except Exception as error:  # noqa: BLE001 - one replica stays without a lease
            self._complain("peer_broken", action.then.replica, repr(error))

    def _tell(self, action: Command | CloseStream | PublishTable) -> None:
        match action:
            case PublishTable():
                self._table = action.table
                for slot in self._watchers:
                    slot.put(action.table)
            case Command():
                if action.stream in self._queues:
                    self._queues[action.stream].put(action.command)
                    self._told.add(action.stream)
            case CloseStream():
                if action.stream in self._queues:
                    self._queues[action.stream].close(action.reason)


_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Scheduler"]
_METHODS: Final[dict[str, MethodDescriptor]] = {
    f"/{_SERVICE.full_name}/{method.name}": method for method in _SERVICE.methods
}
# By whether requests and replies are streams.
_KINDS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class LeaderHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """gRPC handlers that call the service while this process leads, and else refuse.

    leader: returns the leader's address, "" while unknown, which refusals carry.
    """

    def __init__(self, leader: Callable[[], str]) -> None:
        self._leader = leader
        self._service: SchedulerService | None = None

    @property
    def leads(self) -> bool:
        return self._service is not None

    @property
    def service_now(self) -> SchedulerService | None:
        """The leading service, None while this process is a standby."""
        return self._service

    def lead(self, service: SchedulerService) -> None:
        """Answer calls by this service from now on."""
        self._service = service

    def stand_by(self) -> None:
        """Refuse all calls as a standby from now on."""
        self._service = None

    def refused(self, who: str, method: str, reason: str) -> None:
        """Log a call that its caller's certificate did not allow; a standby logs nothing."""
        if self._service is not None:
            self._service.refused(who, method, reason)

    @override
    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = _METHODS.get(handler_call_details.method)
        if method is None:
            return None
        answer = self._refuse if self._service is None else getattr(self._service, method.name)
        handler: grpc.RpcMethodHandler[Any, Any] = _KINDS[
            method.client_streaming, method.server_streaming
        ](
            answer,
            getattr(pb, method.input_type.name).FromString,
            getattr(pb, method.output_type.name).SerializeToString,
        )
        return handler

    async def _refuse(self, request: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        del request
        metadata = ((LEADER_METADATA, self._leader()),)
        await context.abort(grpc.StatusCode.UNAVAILABLE, STANDBY, metadata)

"""Simulated scheduler: the product's process, but for its port, its logs and its signals.

    Leadership ──term──► FencedStore ──► SchedulerService ──► SchedulerCore
        └──────────── LeaderHandlers: the service of the term, or refusals ◄── streams, calls

All of these are the product's own, on a simulated loop, store and gRPC. A copy is `_lead`, after
`rose.main.scheduler._lead`.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from elastic_scheduler import HarvestMode
from rose.process.background_tasks import Background
from rose.rpc import rose_pb2 as pb
from rose.scheduler import wire
from rose.scheduler.core.messages import LogRecord, Offered, Reserve, StoredEvent
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import EPOCHS, STOP, load
from rose.scheduler.service import LeaderHandlers, SchedulerService, ServiceTimes
from rose.store import FencedStore, Leadership, StoreEntry
from tests.chaos.invariants import Invariants
from tests.chaos.simulated_grpc import (
    Begin,
    Call,
    LoopProcess,
    ServerCall,
    addresses_of,
    answer,
    handler_of,
)
from tests.chaos.simulated_store import Answer, StoreStub
from tests.chaos.simulation import Simulation, Stream

# Twice as slow as the product's: seeds cost time.
ELECTION_TICK_S = 0.1
CORE_TICK_S = 0.2


class SchedulerEvents:
    """In the place of the event log: invariants are asked about what it would say."""

    def __init__(self, scheduler: "SimulatedScheduler") -> None:
        self._scheduler = scheduler
        self._life = scheduler.life

    def write(self, event: str, **fields: object) -> None:
        """One line of the log."""
        if self._life == self._scheduler.life:
            self._scheduler.recorded(event, fields)


class BrokenService(SchedulerService):
    """The service with planted bugs."""

    bugs: frozenset[str] = frozenset()

    def _begin(self, event: StoredEvent) -> "asyncio.Task[int | None]":
        if "tells a version before it is durable" in self.bugs:
            self._step(event)
        return super()._begin(event)

    async def _answer(self, request: Any, context: Any) -> int:
        if "answers before it is durable" in self.bugs:
            event = wire.asked(request)
            if isinstance(event, StoredEvent):
                self._begin(event)
                return 0
        return await super()._answer(request, context)

    async def _reserve(self, action: Reserve) -> None:
        if "grants before the epoch is durable" in self.bugs:
            self._step(action.then)
        await super()._reserve(action)

    def _step(self, event: Any) -> int | None:
        if isinstance(event, Offered) and "adopts any epoch" in self.bugs:
            for each in event.held:
                self._core._leasing._book._epochs[each.replica] = each.epoch
        return super()._step(event)


class SimulatedScheduler(LoopProcess):
    """One scheduler of several on a store."""

    def __init__(
        self, world: Simulation, name: str, invariants: Invariants, bugs: frozenset[str]
    ) -> None:
        super().__init__(world, name)
        self._invariants = invariants
        self._bugs = bugs
        self.core: SchedulerCore | None = None

    def begin(self) -> None:
        self.core = None
        self._term = 0
        self._served: dict[int, ServerCall] = {}
        # The term in which each stream began.
        self._terms: dict[int, int] = {}
        self._nodes: dict[int, str] = {}
        self._store = StoreStub(self, self._bugs)
        self._events = SchedulerEvents(self)
        self.leadership = Leadership(
            self._store,
            addresses_of((self.name,)),
            self._lead,
            self._events.write,
            self._clock_s,
            ELECTION_TICK_S,
        )
        self.handlers = LeaderHandlers(lambda: self.leadership.address)
        self._leading = self.keep(self.leadership.run)

    def crashed(self) -> None:
        super().crashed()
        self.core = None

    def stop(self) -> None:
        """After SIGTERM: it gives its lead up, and is gone within a moment."""
        if self.up and not self.paused:
            self.loop.run(self._leading.cancel)

    def _clock_s(self) -> float:
        """Return the clock; a life that is over has no live lease."""
        return float("inf") if self.loop.closed else self.now_s()

    def leads(self) -> bool:
        """Return True if it surely leads now."""
        return self.up and self.core is not None and self.leadership.leads()

    # ---- a term ----

    async def _lead(self, store: FencedStore) -> None:
        entries: Iterable[StoreEntry] = (await store.list("")).entries
        if "stop not read" in self._bugs:
            entries = [e for e in entries if e.key != STOP]
        if "epochs not read" in self._bugs:
            entries = [e for e in entries if not e.key.startswith(EPOCHS)]
        saved = load(entries)
        self._invariants.loaded(store._term, saved)
        core = SchedulerCore(saved, HarvestMode.OFF)
        background = Background(self._events.write)
        kind = BrokenService if self._bugs else SchedulerService
        BrokenService.bugs = self._bugs
        may_lead = store.leads
        if "acts when it may not lead" in self._bugs:
            may_lead = self._still_up
        service = kind(
            core,
            store,
            self._events,  # type: ignore[arg-type]
            leads=may_lead,
            times=ServiceTimes(
                tick_s=CORE_TICK_S, clock=self.now_s, wall_clock=lambda: self.world.now_s
            ),
        )
        self._term = store._term
        self.core = core
        background.start("tick", service.tick)
        if "stop not read" not in self._bugs:
            background.start("stop", service.watch_stop, restarts=None)
        self.handlers.lead(service)
        try:
            await background.failed()
        finally:
            self.core = None
            self.handlers.stand_by()
            service.close()
            await background.close()

    def _still_up(self) -> bool:
        return not self.loop.closed

    def recorded(self, event: str, fields: dict[str, object]) -> None:
        """Its event log gets a line."""
        if event in ("scheduler_leads", "scheduler_steps_down", "stop_read", "peer_refused"):
            self.world.note(f"{self.name}: {event} {fields}")
        self._invariants.recorded(self.name, LogRecord(event, fields))

    # ---- streams and calls ----

    def heard(self, sender: str, message: object) -> None:
        match message:
            case Answer():
                self._store.heard(message)
            case Call():
                self.loop.run(lambda: self.keep_once(self._answer(sender, message)))

    def keep_once(self, work: Any) -> None:
        """Run a coroutine that comes to its end."""
        asyncio.get_running_loop().create_task(work)

    async def _answer(self, sender: str, call: Call) -> None:
        try:
            reply = await answer(handler_of(self.handlers, call.method), call)
        except Exception as error:
            self.world.failed(error)
            return
        self.send(sender, reply)

    def stream_heard(self, stream: Stream, message: object) -> None:
        self.loop.run(lambda: self._stream_heard(stream, message))

    def _stream_heard(self, stream: Stream, message: Any) -> None:
        number = stream.number
        if isinstance(message, Begin):
            handler = handler_of(self.handlers, message.method)
            self._served[number] = ServerCall(self, stream, handler, self._wrote)
            self._terms[number] = self._term
        elif (call := self._served.get(number)) is not None:
            if isinstance(message, pb.NodeReport):
                self._nodes[number] = message.node
            call.heard(message)

    def stream_ended(self, stream: Stream) -> None:
        self._nodes.pop(stream.number, None)
        self._terms.pop(stream.number, None)
        call = self._served.pop(stream.number, None)
        if call is not None:
            self.loop.run(call.cancel)

    def _wrote(self, stream: Stream, message: object) -> None:
        if isinstance(message, pb.NodeCommand) and stream.number in self._nodes:
            node = self._nodes[stream.number]
            self._invariants.commanded(self.name, self._terms[stream.number], node, message)

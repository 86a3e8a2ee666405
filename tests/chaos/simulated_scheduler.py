"""Simulated scheduler: the real election and the real core in a shell as short as can be.

    FOLLOWER ──Lead(term)──► list everything ──► SchedulerCore ──► streams, requests, ticks
        ▲                                             │
        └────── StepDown, a write was refused ────────┘

After `rose.store.leadership` (calls of the election), `rose.store.fenced` (each write expects the
leader's key and moves the fence), `rose.scheduler.service` (what is durable before what).
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_scheduler import HarvestMode
from elastic_scheduler.leases.harvest_mode import stricter
from rose.errors import ConfigError, RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core import SchedulerCore
from rose.scheduler.messages import (
    Action,
    Answer,
    Attached,
    CloseStream,
    Command,
    Demanded,
    Detached,
    Event,
    HarvestSet,
    LogRecord,
    Offered,
    PublishTable,
    Reserve,
    Save,
    StoredEvent,
    StoreWrite,
    Tick,
)
from rose.scheduler.persistence import STOP, load, stop_of
from rose.store import ABSENT, Delete, Expect, Listing, Put, StoreEntry
from rose.store import election as ballot
from rose.store.fenced import FENCE
from tests.chaos import simulated_store as store
from tests.chaos.invariants import Invariants
from tests.chaos.simulated_store import StoreClient
from tests.chaos.simulation import SimulatedProcess, Simulation, Stream

ELECTION_TICK_S = 0.1
CORE_TICK_S = 0.2
BEAT_S = 1.0
STOP_POLL_S = 0.5
RETRY_S = 0.1
# A stream on which nothing comes: keepalive ends it.
SILENT_S = 10.0


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a node's stream."""

    node: str


@dataclass(frozen=True, slots=True)
class WatchTables:
    """First message of a gateway's stream."""


@dataclass(frozen=True, slots=True)
class Call:
    """A unary call of a trainer or operator; answered with `Reply`."""

    number: int
    event: StoredEvent


@dataclass(frozen=True, slots=True)
class Reply:
    """`value` None: refused. `leads` False: another scheduler does."""

    number: int
    value: int | None
    leads: bool = True


class FencedWriter:
    """Writes of one term, in order, each until it is durable, as `FencedStore` does them."""

    def __init__(self, scheduler: "SimulatedScheduler", term: int) -> None:
        self._scheduler = scheduler
        self._term = term
        self._queue: deque[tuple[tuple[StoreWrite, ...], Callable[[], None]]] = deque()
        self._busy = False
        self._fence: int | None = None
        self._writes = 0

    def write(self, writes: Sequence[StoreWrite], then: Callable[[], None]) -> None:
        """Call `then` once all of them are durable; never when the term ends before."""
        if not writes:
            then()
            return
        self._queue.append((tuple(writes), then))
        self._go_on()

    @property
    def _current(self) -> bool:
        return self._scheduler.writer is self

    def _go_on(self) -> None:
        if not self._busy and self._queue:
            self._busy = True
            self._begin()

    def _begin(self) -> None:
        self._writes += 1
        self._attempt(json.dumps({"term": self._term, "write": self._writes}).encode())

    def _attempt(self, stamp: bytes) -> None:
        if not self._current:
            return
        if not self._scheduler.leads():
            self._scheduler.lost(self._term)
            return
        if self._fence is None:
            self._ask(store.Get(FENCE), lambda entry: self._fenced(stamp, entry))
        else:
            self._txn(stamp, self._fence)

    def _fenced(self, stamp: bytes, entry: object) -> None:
        self._fence = entry.revision if isinstance(entry, StoreEntry) else ABSENT
        self._txn(stamp, self._fence)

    def _txn(self, stamp: bytes, fence: int) -> None:
        self._fence = None
        expect = (Expect(ballot.LEADER, self._term), Expect(FENCE, fence))
        if "no fencing" in self._scheduler.world_bugs:
            expect = ()
        writes = [
            Delete(each.key) if each.value is None else Put(each.key, each.value)
            for each in self._queue[0][0]
        ]
        request = store.Txn(expect, (*writes, Put(FENCE, stamp)), self._term)
        self._ask(request, lambda revision: self._answered(stamp, fence, revision))

    def _answered(self, stamp: bytes, fence: int, revision: object) -> None:
        if isinstance(revision, int):
            self._fence = revision
            self._done()
            return
        self._ask(store.Get(ballot.LEADER), lambda leader: self._judged(stamp, fence, leader))

    def _judged(self, stamp: bytes, fence: int, leader: object) -> None:
        if not isinstance(leader, StoreEntry) or leader.revision != self._term:
            self._scheduler.lost(self._term)
            return
        self._ask(store.Get(FENCE), lambda entry: self._looked(stamp, entry))

    def _looked(self, stamp: bytes, entry: object) -> None:
        if isinstance(entry, StoreEntry) and entry.value == stamp:
            self._fence = entry.revision
            self._done()
        else:
            self._attempt(stamp)

    def _done(self) -> None:
        _, then = self._queue.popleft()
        self._busy = False
        then()
        if self._current:
            self._go_on()

    def _ask(self, request: store.Request, then: Callable[[object], None]) -> None:
        def answered(value: object, known: bool) -> None:
            if not self._current:
                return
            if known:
                then(value)
            else:
                self._scheduler.after(RETRY_S, self._begin)

        self._scheduler.client.ask(request, answered)


class SimulatedScheduler(SimulatedProcess):
    """One scheduler. Streams and calls are taken while it leads."""

    def __init__(
        self, world: Simulation, name: str, invariants: Invariants, bugs: frozenset[str]
    ) -> None:
        super().__init__(world, name)
        self.world_bugs = bugs
        self._invariants = invariants

    def started(self) -> None:
        self.client = StoreClient(self)
        self._election = ballot.Election(ballot.Candidate(self.name, f"{self.name}:{self.life}"))
        self.writer: FencedWriter | None = None
        self.core: SchedulerCore | None = None
        self._term = 0
        self._streams: dict[int, Stream] = {}
        self._nodes: dict[int, str] = {}
        self._heard_s: dict[int, float] = {}
        self._watchers: dict[int, Stream] = {}
        self._every_stream: dict[int, Stream] = {}
        self._commits: deque[tuple[StoredEvent, int | None, int, Callable[[int | None], None]]] = (
            deque()
        )
        self._committing = False
        self._closings = 0
        self._seen_stop = ABSENT
        self._starts = itertools.count(1)
        self._tick_election()
        self.after(CORE_TICK_S, self._tick_core)
        self.every(BEAT_S, self._beat)
        self.every(STOP_POLL_S, self._poll_stop)

    def heard(self, sender: str, message: object) -> None:
        match message:
            case store.Answer():
                self.client.heard(message)
            case Call():
                self._called(sender, message)
            case Demanded():
                self.step(message)

    # ---- election ----

    def leads(self) -> bool:
        """Whether it surely leads now."""
        status = self._election.status()
        return status.term != 0 and self.now_s() < status.valid_until_s

    def lost(self, term: int) -> None:
        """A write of the term was refused."""
        self._elect(ballot.WriteRefused(term))

    def _tick_election(self) -> None:
        self._elect(ballot.ElectionTick())
        self.after(ELECTION_TICK_S, self._tick_election)

    def _elect(self, event: ballot.Event) -> None:
        for action in self._election.step(event, self.now_s()):
            self._carry_out_ballot(action)

    def _carry_out_ballot(self, action: ballot.Action) -> None:
        begun_s = self.now_s()
        match action:
            case ballot.Lead(term):
                self._begin_term(term)
            case ballot.StepDown(reason):
                self.world.note(f"{self.name} steps down: {reason}")
                self._end_term()
            case ballot.GiveUpLease(lease):
                self.client.ask(store.RevokeLease(lease), lambda value, known: None)
            case ballot.Look():
                self._call(store.Get(ballot.LEADER), lambda entry: ballot.Seen(entry))  # type: ignore[arg-type]
            case ballot.AskLease(ttl_s):
                self._call(
                    store.GrantLease(ttl_s),
                    lambda lease: ballot.LeaseGiven(int(lease), begun_s),  # type: ignore[call-overload]
                )
            case ballot.Campaign(lease):
                value = ballot.Candidate(self.name, f"{self.name}:{self.life}").value()
                put = Put(ballot.LEADER, value, lease)
                self._call(
                    store.Txn((Expect(ballot.LEADER, ABSENT),), (put,)),
                    lambda term: ballot.CampaignEnded(term),  # type: ignore[arg-type]
                )
            case ballot.KeepLease(lease):
                self._call(
                    store.KeepLease(lease),
                    lambda left_s: ballot.LeaseKept(float(left_s), begun_s),  # type: ignore[arg-type]
                )

    def _call(self, request: store.Request, event: Callable[[object], ballot.Event]) -> None:
        self.client.ask(
            request,
            lambda value, known: self._elect(event(value) if known else ballot.CallFailed()),
        )

    def _begin_term(self, term: int) -> None:
        self.world.note(f"{self.name} leads, term {term}")
        self._term = term
        self.writer = FencedWriter(self, term)

        def listed(value: object, known: bool) -> None:
            if self._term != term:
                return
            if not known or not isinstance(value, Listing):
                self._elect(ballot.TermFailed(term, "the store does not answer"))
                return
            entries = value.entries
            if "stop not read" in self.world_bugs:
                entries = tuple(e for e in entries if e.key not in (STOP, "harvest"))
            if "epochs not read" in self.world_bugs:
                entries = tuple(e for e in entries if not e.key.startswith("epochs/"))
            saved = load(entries)
            self._invariants.loaded(saved)
            self.core = SchedulerCore(saved)
            self.step(Tick(self.world.now_s))

        self.client.ask(store.List(""), listed)

    def _end_term(self) -> None:
        self.core, self.writer, self._term = None, None, 0
        for stream in list(self._every_stream.values()):
            stream.close(self.name)
        self._streams.clear()
        self._watchers.clear()
        self._nodes.clear()
        self._every_stream.clear()
        self._commits.clear()
        self._committing = False
        self._seen_stop = ABSENT

    # ---- streams ----

    def stream_opened(self, stream: Stream) -> None:
        if self.core is None or not self.leads():
            stream.close(self.name)
            return
        self._every_stream[stream.number] = stream
        self._heard_s[stream.number] = self.now_s()

    def stream_heard(self, stream: Stream, message: object) -> None:
        number = stream.number
        if number not in self._every_stream:
            return
        self._heard_s[number] = self.now_s()
        match message:
            case Hello(node):
                self._streams[number] = stream
                self._nodes[number] = node
                self._handle(stream, Attached(node, number, takes_caps=True))
            case WatchTables():
                self._watchers[number] = stream
            case _:
                self._handle(stream, message)  # type: ignore[arg-type]

    def stream_ended(self, stream: Stream) -> None:
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        number = stream.number
        self._every_stream.pop(number, None)
        self._watchers.pop(number, None)
        if self._streams.pop(number, None) is not None:
            self.step(Detached(number))

    def _handle(self, stream: Stream, event: Event) -> None:
        if self.step(event) is False:
            self._close(stream)

    def _close(self, stream: Stream) -> None:
        stream.close(self.name)
        self._forget(stream)

    # ---- the core ----

    def step(self, event: Event) -> int | bool | None:
        """Feed the core; False when it refused or this scheduler leads no more."""
        if self.core is None:
            return False
        if not self.leads() and "acts when it may not lead" not in self.world_bugs:
            return False
        if isinstance(event, Offered) and "adopts any epoch" in self.world_bugs:
            self._adopt_blindly(event)
        try:
            actions = self.core.step(event, self.now_s())
        except (RefusedError, ConfigError) as error:
            self.world.note(f"{self.name} refused {type(event).__name__}: {error}")
            return False
        return self._carry_out(actions)

    def _adopt_blindly(self, event: Offered) -> None:
        """Planted: the epoch of a held lease is taken for the persisted one."""
        assert self.core is not None
        for each in event.held:
            self.core._leasing._book._epochs[each.replica] = each.epoch

    def _carry_out(self, actions: Sequence[Action]) -> int | None:  # noqa: C901 - one match
        answer = None
        for action in actions:
            match action:
                case Answer():
                    answer = action.value
                case Reserve():
                    self._reserve(action)
                case Save():
                    if self.writer:
                        self.writer.write((action.write,), lambda: None)
                case LogRecord():
                    self._invariants.recorded(self.name, action)
                case Command():
                    if action.stream in self._streams:
                        self._invariants.commanded(self._nodes[action.stream], action.command)
                        self._streams[action.stream].send(self.name, action.command)
                case PublishTable():
                    for stream in list(self._watchers.values()):
                        stream.send(self.name, _copy(action.table))
                case CloseStream():
                    if action.stream in self._streams:
                        self._close(self._streams[action.stream])
        return answer

    def _reserve(self, action: Reserve) -> None:
        if "grants before the epoch is durable" in self.world_bugs:
            self.after(0.0, lambda: self._ignore(self.step(action.then)))
            return
        if self.writer:
            self.writer.write((action.write,), lambda: self._ignore(self.step(action.then)))

    def _ignore(self, value: object) -> None:
        """A step of which nobody waits to hear."""

    def _tick_core(self) -> None:
        if self.core is not None:
            for number, stream in list(self._every_stream.items()):
                if self.now_s() > self._heard_s.get(number, 0.0) + SILENT_S:
                    self._close(stream)
            self.step(Tick(self.world.now_s))
        self.after(CORE_TICK_S, self._tick_core)

    def _beat(self) -> None:
        if self.core is not None and self.leads():
            for stream in self._streams.values():
                stream.send(self.name, pb.NodeCommand())

    def _poll_stop(self) -> None:
        core, term = self.core, self._term
        if core is None:
            return

        def read(entry: object, known: bool) -> None:
            if not known or not isinstance(entry, StoreEntry) or self.core is not core:
                return
            if entry.revision == self._seen_stop or self._commits or self._term != term:
                return
            mode, now, first = stop_of(entry.value), core.capacity.stop.mode, not self._seen_stop
            self._seen_stop = entry.revision
            if mode is now or (first and stricter(mode, now) is now):
                return
            if "stop not read" in self.world_bugs:
                return
            self._closings += mode is not HarvestMode.ACTIVE
            self.step(HarvestSet(mode, None, opens=False))

        self.client.ask(store.Get(STOP), read)

    # ---- trainers and operators ----

    def _called(self, sender: str, call: Call) -> None:
        if self.core is None or not self.leads():
            self.send(sender, Reply(call.number, None, leads=False))
            return

        def answer(value: int | None) -> None:
            self.send(sender, Reply(call.number, value))

        event = call.event
        closing = isinstance(event, HarvestSet) and event.mode is not HarvestMode.ACTIVE
        released = self.step(event) if closing else None
        self._closings += closing
        done = released if isinstance(released, int) and released is not False else None
        early = "answers before it is durable" in self.world_bugs
        if early:
            answer(0)
        if "tells a version before it is durable" in self.world_bugs:
            self.step(event)
        self._commits.append((event, done, self._closings, (lambda _: None) if early else answer))
        self._commit_next()

    def _commit_next(self) -> None:
        if self._committing or not self._commits or self.core is None or self.writer is None:
            return
        event, done, closings, answer = self._commits[0]
        self._committing = True
        core = self.core

        def durable() -> None:
            if self.core is not core:
                return
            over: int | None = done
            if done is None:
                if isinstance(event, HarvestSet) and self._closings != closings:
                    over = None
                else:
                    value = self.step(event)
                    over = None if value is False else int(value or 0)
            self._committed(answer, over)

        try:
            writes = core.writes(event)
        except (RefusedError, ConfigError) as error:
            self.world.note(f"{self.name} refused {type(event).__name__}: {error}")
            self._committed(answer, None)
            return
        self.writer.write(writes, durable)

    def _committed(self, answer: Callable[[int | None], None], value: int | None) -> None:
        if self._commits:
            self._commits.popleft()
        self._committing = False
        answer(value)
        self._commit_next()


def _copy(table: pb.ReplicaTable) -> pb.ReplicaTable:
    """The core goes on with its own; what was sent stays as it was."""
    kept = pb.ReplicaTable()
    kept.CopyFrom(table)
    return kept

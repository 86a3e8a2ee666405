"""Lease of one replica: the state machine that decides when to admit and drain, and its shell.

    grant ──► Admit ──► (turns run) ──► release, expiry, node's own revocation ──► Drain ──► Ended

A new engine admits no turn, so a lease does not outlive the engine that it was granted for: the
node revokes it, and the scheduler grants another one when the next engine is healthy. Only an
engine that is started anew for the lease's own job does not end it (`SwitchBegun`).

Every event returns all that is to be done now. Words to the scheduler (LeaseTakenBack, Ended) come
once. Admit and Drain are calls of the engine: every step asks for them again until the answer is in
(EngineAdmitted, EngineDrained), so a caller that is calling already may leave them, and one that
failed sends a LeaseTick. `LeaseAgent` makes these calls.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from rose.clock import boot_clock_s
from rose.errors import RefusedError, UnavailableError
from rose.logs.eventlog import EventLog
from rose.node.replica_client import ReplicaClient
from rose.rpc import rose_pb2

EXPIRED = "expired"
ENGINE_DOWN = "engine is not running"
ADOPTED = "its node daemon was started anew"
SUPERSEDED = "another lease took its place"
MAX_ADMIT_FAILURES = 6
MAX_DRAIN_FAILURES = 2
RETRY_PAUSE_S = 0.3
UNANSWERED = "engine does not admit"


@dataclass(slots=True)
class HeldLease:
    """Epoch and end time of the newest lease that the node has seen for one replica; an older epoch
    is refused, and a lease that is not renewed expires.
    """

    epoch: int = 0
    until_s: float = 0.0

    @property
    def open(self) -> bool:
        """True until the lease is released or revoked, even if its time has already expired."""
        return self.until_s > 0.0

    def grant(self, epoch: int, ttl_s: float, now_s: float) -> bool:
        """Record a grant or renewal and return True; return False, and change nothing, if its epoch
        is older than the held one or renews a lease that is over.
        """
        if epoch < self.epoch or (epoch == self.epoch and not self.active(now_s)):
            return False
        self.epoch = epoch
        self.until_s = now_s + ttl_s
        return True

    def end(self, epoch: int) -> bool:
        """End the lease of this epoch or an older one and return True; return False, and change
        nothing, if a newer lease is held.
        """
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        self.until_s = 0.0
        return True

    def active(self, now_s: float) -> bool:
        """Return True if the lease has not expired by `now_s`, so that its turns may run."""
        return now_s < self.until_s


# ---- events ----


@dataclass(frozen=True, slots=True)
class EngineUp:
    """Event for the lease state machine: a new or adopted engine answers.

    epoch: epoch of the newest lease that the engine knows, 0 for a new engine. admitting: True if
    it admits turns under a lease of an earlier daemon; that lease is over, because the stream that
    renewed it ended with the daemon, so the engine is drained.
    """

    epoch: int = 0
    admitting: bool = False


@dataclass(frozen=True, slots=True)
class EngineDown:
    """Event for the lease state machine: the engine process ended, and every turn that it ran ended
    with it.
    """


@dataclass(frozen=True, slots=True)
class SwitchBegun:
    """Event for the lease state machine: the engine is restarted for the lease's own job, so for
    the next `for_s` seconds an engine that is down does not end the lease.
    """

    for_s: float


@dataclass(frozen=True, slots=True)
class Granted:
    """Event for the lease state machine: the scheduler granted or renewed the lease `epoch` for
    `ttl_s` seconds from now.
    """

    epoch: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Released:
    """Event for the lease state machine: the scheduler asks the node to end the lease `epoch` and
    to report its end.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """Event for the lease state machine: the node itself ends the current lease, for this
    reason.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class EngineAdmitted:
    """Event for the lease state machine: the engine answered the Admit call, so it admits turns
    under the lease `epoch`; ignored unless `life` is the current engine's.
    """

    epoch: int
    life: int


@dataclass(frozen=True, slots=True)
class EngineDrained:
    """Event for the lease state machine: the engine answered the Drain call; it admits no turn, and
    `aborted` turns were ended. Ignored unless `life` is the current engine's.
    """

    life: int
    aborted: int = 0


@dataclass(frozen=True, slots=True)
class LeaseTick:
    """Event for the lease state machine: time passed, so expired leases end and calls that are
    still due are returned again.
    """


Event = (
    EngineUp
    | EngineDown
    | SwitchBegun
    | Granted
    | Released
    | Revoked
    | EngineAdmitted
    | EngineDrained
    | LeaseTick
)

# ---- actions, carried out in order ----


@dataclass(frozen=True, slots=True)
class Admit:
    """Action of the lease state machine: call the engine to admit turns under the lease `epoch`,
    and answer with an EngineAdmitted event of the same `life`, the count of engine starts.
    """

    epoch: int
    life: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Action of the lease state machine: call the engine to stop admission and end all turns of the
    lease `epoch`, and answer with an EngineDrained event of the same `life`.
    """

    epoch: int
    reason: str
    life: int


@dataclass(frozen=True, slots=True)
class LeaseTakenBack:
    """Action of the lease state machine: send the scheduler a revocation, because the node ended
    the lease `epoch` without being asked.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Action of the lease state machine: record that no turn of the lease `epoch` runs any more and
    that `aborted` turns were ended by the drain.

    asked: True if the scheduler asked for the release and waits for this report.
    """

    epoch: int
    reason: str
    aborted: int
    asked: bool


Action = Admit | Drain | LeaseTakenBack | Ended


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """Snapshot of a lease state machine: the newest lease's epoch and end time, and the engine's
    part in it.

    until_s: end time of the lease, 0.0 if it was released or revoked. vacant: True if the engine
    admits no turns and was not asked to. life: count of engine starts and adoptions. ending: epoch
    of the lease that is being drained, None without one.
    """

    epoch: int
    until_s: float
    vacant: bool
    life: int
    engine_up: bool
    ending: int | None

    def active(self, now_s: float) -> bool:
        """Return True if the lease has not expired by `now_s`, so that its turns may run."""
        return now_s < self.until_s


class LeaseStateMachine:
    """State machine of one replica's lease, without I/O: events in, actions out.

    Answers to calls of an earlier engine process are ignored.
    """

    def __init__(self) -> None:
        self._held = HeldLease()
        self._life = 0
        self._engine_up = False
        self._switching_until_s = 0.0
        # Lease whose turns the engine may run: set when Admit is due, since its answer may be lost.
        self._admits: int | None = None
        self._answered = False
        self._ending: Ended | None = None
        self._aborted = 0

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event, then return the actions that are due, in order; a call of the engine
        (Admit or Drain) is the last, and is returned by every step until it is answered.
        """
        actions: list[Action] = []
        self._take(event, now_s, actions)
        if self._held.open and not self._engine_up and now_s >= self._switching_until_s:
            self._take_back(ENGINE_DOWN, actions)
        if self._held.open and not self._held.active(now_s):
            self._take_back(EXPIRED, actions)
        if self._ending is not None:
            if self._admits is not None:
                return [*actions, Drain(self._ending.epoch, self._ending.reason, self._life)]
            actions.append(replace(self._ending, aborted=self._aborted))
            self._ending, self._aborted = None, 0
        epoch = self._held.epoch
        answered = self._answered and self._admits == epoch
        if self._held.open and self._engine_up and not answered:
            self._admits, self._answered = epoch, False
            actions.append(Admit(epoch, self._life))
        return actions

    def status(self) -> LeaseStatus:
        """Return a snapshot of the lease and its engine's state (any thread)."""
        held, ending = self._held, self._ending
        return LeaseStatus(
            # Read the epoch first: in a snapshot taken halfway through a change it is too old,
            # never too new.
            epoch=held.epoch,
            until_s=held.until_s,
            vacant=self._admits is None,
            life=self._life,
            engine_up=self._engine_up,
            ending=None if ending is None else ending.epoch,
        )

    def _take(self, event: Event, now_s: float, actions: list[Action]) -> None:
        match event:
            case Granted():
                before = self._held.epoch
                taken = self._held.grant(event.epoch, event.ttl_s, now_s)
                if taken and event.epoch > before and self._admits is not None:
                    # The new lease may be another job's: the earlier lease ends with its turns.
                    self._ending = self._ending or Ended(before, SUPERSEDED, 0, asked=False)
            case Released():
                if self._held.end(event.epoch):
                    self._ending = Ended(event.epoch, event.reason, 0, asked=True)
            case Revoked():
                self._take_back(event.reason, actions)
            case SwitchBegun():
                self._switching_until_s = now_s + event.for_s
            case EngineUp() | EngineDown() | EngineAdmitted() | EngineDrained():
                self._hear(event)
            case LeaseTick():
                pass

    def _hear(self, event: EngineUp | EngineDown | EngineAdmitted | EngineDrained) -> None:
        match event:
            case EngineUp():
                self._life += 1
                self._engine_up = True
                self._switching_until_s = 0.0
                self._admits = event.epoch if event.admitting else None
                self._held.end(event.epoch)
                if event.admitting:
                    self._ending = Ended(event.epoch, ADOPTED, 0, asked=False)
            case EngineDown():
                self._engine_up = False
                self._admits = None
            case EngineAdmitted():
                if event.life == self._life and self._engine_up:
                    self._admits, self._answered = event.epoch, True
            case EngineDrained():
                if event.life == self._life:
                    self._admits = None
                    self._aborted = event.aborted

    def _take_back(self, reason: str, actions: list[Action]) -> None:
        if self._held.open:
            epoch = self._held.epoch
            self._held.end(epoch)
            self._ending = Ended(epoch, reason, 0, asked=False)
            actions.append(LeaseTakenBack(epoch, reason))


class LeaseAgent:
    """Driver of one LeaseStateMachine: it calls the replica's admit and drain routes, with retries,
    and passes reports on to the scheduler.

    tell: called with each LeaseTakenBack and Ended. on_broken: called with a reason when the engine
    refused or missed too many calls in a row and must be restarted.
    """

    def __init__(
        self,
        replica: str,
        client: ReplicaClient,
        events: EventLog,
        tell: Callable[[LeaseTakenBack | Ended], None],
        on_broken: Callable[[str], None],
        clock: Callable[[], float] = boot_clock_s,
    ) -> None:
        self.core = LeaseStateMachine()
        self._clock = clock
        self._replica = replica
        self._client = client
        self._events = events
        self._tell = tell
        self._on_broken = on_broken
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._failures = 0
        self.job = ""
        # Newest version of the job by the scheduler, None if unknown.
        self._latest: int | None = None

    def lease_epoch(self) -> int | None:
        """Return the epoch of the unexpired lease, None without one (any thread)."""
        status = self.core.status()
        return status.epoch if status.active(self._clock()) else None

    def held(self) -> rose_pb2.HeldLease | None:
        """Return the unexpired lease as a message (job, epoch, remaining seconds) for a scheduler
        that may not know it, None without one.
        """
        status, now_s = self.core.status(), self._clock()
        if not status.active(now_s):
            return None
        left_s = status.until_s - now_s
        return rose_pb2.HeldLease(job=self.job, epoch=status.epoch, left_s=left_s)

    def grant(self, epoch: int, ttl_s: float, job: str = "", latest: int | None = None) -> bool:
        """Apply a grant or renewal of a job's lease and return True; return False, and change
        nothing, if its epoch is older than the newest one seen.
        """
        if epoch < self.core.status().epoch:
            return False
        self.job, self._latest = job, latest
        self.happened(Granted(epoch, ttl_s))
        return True

    def happened(self, event: Event) -> None:
        """Apply an event to the state machine at once, then wake `run`, which makes the calls of
        the engine that are due.
        """
        self._step(event)
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            match self._step(LeaseTick()):
                case Admit() as call:
                    await self._admit(call)
                case Drain() as call:
                    await self._drain(call)
                case None:
                    await self._sleep()

    async def settle(self, patience_s: float) -> None:
        """Wait until the engine is drained and no call of it is due, for at most `patience_s`
        seconds; a timeout raises nothing.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._quiet.wait()

    async def _sleep(self) -> None:
        until_s = self.core.status().until_s
        patience_s = max(0.0, until_s - self._clock()) if until_s else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._wake.wait()

    def _step(self, event: Event) -> Admit | Drain | None:
        """Apply an event, log and report its LeaseTakenBack and Ended actions, and return the call
        of the engine that is due, None without one.
        """
        call: Admit | Drain | None = None
        for action in self.core.step(event, self._clock()):
            match action:
                case LeaseTakenBack():
                    self._log("lease_taken_back", epoch=action.epoch, reason=action.reason)
                    self._tell(action)
                case Ended(epoch, reason, aborted):
                    self._log("lease_ended", epoch=epoch, reason=reason, aborted=aborted)
                    self._tell(action)
                case Admit() | Drain():
                    call = action
        if call is None and self.core.status().vacant:
            self._quiet.set()
        else:
            self._quiet.clear()
        return call

    async def _admit(self, call: Admit) -> None:
        try:
            await self._client.admit(call.epoch, self.job, self._latest)
        except (RefusedError, UnavailableError) as error:
            self._log("admit_failed", epoch=call.epoch, message=str(error))
            await self._failed(MAX_ADMIT_FAILURES)
            return
        self._failures = 0
        self._step(EngineAdmitted(call.epoch, call.life))
        self._log("lease_taken", epoch=call.epoch)

    async def _drain(self, call: Drain) -> None:
        try:
            aborted = await self._client.drain(call.epoch, call.reason)
        except (RefusedError, UnavailableError) as error:
            self._log("drain_failed", epoch=call.epoch, message=str(error))
            await self._failed(MAX_DRAIN_FAILURES)
            return
        self._failures = 0
        self._step(EngineDrained(call.life, aborted))

    async def _failed(self, limit: int) -> None:
        """Count a failed call of the engine and pause before the next one; after `limit` failures
        in a row treat the engine as down and call `on_broken`.
        """
        if not self.core.status().engine_up:
            # The engine has ended meanwhile: call the next one.
            self._failures = 0
            return
        self._failures += 1
        if self._failures < limit:
            await asyncio.sleep(RETRY_PAUSE_S)
            return
        self._failures = 0
        self._step(EngineDown())
        self._on_broken(UNANSWERED)

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, replica=self._replica, **fields)

"""Lease state machine of one replica: decides by lease and engine when to admit and to drain.

    grant ──► Admit ──► (turns run) ──► release, expiry, node's own revocation ──► Drain ──► Ended

A new engine admits no turn, so a lease does not outlive the engine that it was granted for: the
node revokes it, and the scheduler grants another one when the next engine is healthy. Only an
engine that is started anew for the lease's own job does not end it (`SwitchBegun`). No IO.

Every event returns all that is to be done now. Words to the scheduler (TakenBack, Ended) come once.
Admit and Drain are calls of the engine: they are asked for again by every step until the answer is
in (Admitted, Drained), so a caller that is calling already may leave them, and one that failed
sends a Tick.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class HeldLease:
    """The newest lease seen; epochs only grow, and silence ends it."""

    epoch: int = 0
    until_s: float = 0.0

    @property
    def open(self) -> bool:
        """True until the lease is ended; its time may be over earlier."""
        return self.until_s > 0.0

    def grant(self, epoch: int, ttl_s: float, now_s: float) -> bool:
        """Take a grant or a renewal; False when it is of the past."""
        if epoch < self.epoch or (epoch == self.epoch and not self.active(now_s)):
            return False
        self.epoch = epoch
        self.until_s = now_s + ttl_s
        return True

    def end(self, epoch: int) -> bool:
        """Take a release; False when a newer lease holds."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        self.until_s = 0.0
        return True

    def active(self, now_s: float) -> bool:
        """Return True if turns may run now."""
        return now_s < self.until_s


EXPIRED = "expired"
ENGINE_DOWN = "engine is not running"
ADOPTED = "its node daemon was started anew"
SUPERSEDED = "another lease took its place"

# ---- events ----


@dataclass(frozen=True, slots=True)
class EngineUp:
    """An engine answers. `epoch`: the newest lease that it knows of, 0 when it is new.

    One that admits already does so for a lease of an earlier daemon's, which is over: streams that
    a lease is renewed on end with the daemon.
    """

    epoch: int = 0
    admitting: bool = False


@dataclass(frozen=True, slots=True)
class EngineDown:
    """The engine ended, and its turns with it."""


@dataclass(frozen=True, slots=True)
class SwitchBegun:
    """The engine is started anew for the lease's job: the lease lives on, for so long at most."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Granted:
    """The scheduler granted or renewed the lease."""

    epoch: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Released:
    """The scheduler wants the lease to end."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """The node wants the lease to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineAdmitted:
    """The engine of that `life` opened its admission."""

    epoch: int
    life: int


@dataclass(frozen=True, slots=True)
class EngineDrained:
    """The engine of that `life` closed its admission and ended so many turns."""

    life: int
    aborted: int = 0


@dataclass(frozen=True, slots=True)
class LeaseTick:
    """Time passed."""


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
    """Open the engine's admission for the lease `epoch`; the answer names the `life`."""

    epoch: int
    life: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Close admission and end all turns of the lease `epoch`; the answer names the `life`."""

    epoch: int
    reason: str
    life: int


@dataclass(frozen=True, slots=True)
class LeaseTakenBack:
    """Tell the scheduler that the node ended the lease by itself."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing of the lease `epoch` runs any more. `asked`: the scheduler waits to hear it."""

    epoch: int
    reason: str
    aborted: int
    asked: bool


Action = Admit | Drain | LeaseTakenBack | Ended


@dataclass(frozen=True, slots=True)
class _Ending:
    epoch: int
    reason: str
    asked: bool


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """The newest lease seen, until when it holds (0.0 when it was ended), and what the engine does.

    `vacant`: it runs nobody's turns, nor was it asked to. `life` counts its lives. `ending`: which
    lease is being ended.
    """

    epoch: int
    until_s: float
    vacant: bool
    life: int
    engine_up: bool
    ending: int | None

    def active(self, now_s: float) -> bool:
        """Return True if turns may run now."""
        return now_s < self.until_s


class LeaseStateMachine:
    """One replica's lease and what its engine knows of it.

    Answers of an earlier life of the engine say nothing about this one.
    """

    def __init__(self) -> None:
        self._held = HeldLease()
        self._life = 0
        self._engine_up = False
        self._switching_until_s = 0.0
        # The lease whose turns the engine may run: from the call on, for its answer may be lost.
        self._admits: int | None = None
        self._answered = False
        self._ending: _Ending | None = None
        self._aborted = 0

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions for an event; a call of the engine, Admit or Drain, comes last."""
        actions: list[Action] = []
        self._take(event, now_s, actions)
        if self._held.open and not self._engine_up and now_s >= self._switching_until_s:
            self._take_back(ENGINE_DOWN, actions)
        if self._held.open and not self._held.active(now_s):
            self._take_back(EXPIRED, actions)
        if self._ending is not None:
            ending = self._ending
            if self._admits is not None:
                return [*actions, Drain(ending.epoch, ending.reason, self._life)]
            actions.append(Ended(ending.epoch, ending.reason, self._aborted, ending.asked))
            self._ending, self._aborted = None, 0
        epoch = self._held.epoch
        answered = self._answered and self._admits == epoch
        if self._held.open and self._engine_up and not answered:
            self._admits, self._answered = epoch, False
            actions.append(Admit(epoch, self._life))
        return actions

    def status(self) -> LeaseStatus:
        """Return a snapshot of the state (any thread)."""
        held, ending = self._held, self._ending
        return LeaseStatus(
            # In this order: seen halfway through a change, an epoch is too old, never too new.
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
                    self._ending = self._ending or _Ending(before, SUPERSEDED, asked=False)
            case Released():
                if self._held.end(event.epoch):
                    self._ending = _Ending(event.epoch, event.reason, asked=True)
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
                    self._ending = _Ending(event.epoch, ADOPTED, asked=False)
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
            self._ending = _Ending(epoch, reason, asked=False)
            actions.append(LeaseTakenBack(epoch, reason))

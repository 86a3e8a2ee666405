"""Lease state machine of one replica: decides by lease and engine when to admit and to drain.

    grant ──► Admit ──► (turns run) ──► release, expiry, node's own revocation ──► Drain ──► Ended

A new engine admits no turn, so a lease never outlives the engine that it was granted for: the node
revokes it, and the scheduler grants another one when the next engine is healthy. No IO.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class HeldLease:
    """The newest lease seen; epochs only grow, and silence ends it."""

    epoch: int = 0
    until_s: float = 0.0

    @property
    def open(self) -> bool:
        """Whether it was not ended, though its time may be over."""
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
        """Whether turns may run now."""
        return now_s < self.until_s


EXPIRED = "expired"
ENGINE_DOWN = "engine is not running"
ADOPTED = "its node daemon was started anew"


@dataclass(frozen=True, slots=True)
class Admit:
    """Open the engine's admission for the lease `epoch`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Close admission and end all turns of the lease `epoch`."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Revoked:
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


Step = Admit | Drain | Revoked | Ended


@dataclass(frozen=True, slots=True)
class _Ending:
    epoch: int
    reason: str
    asked: bool


class LeaseStateMachine:
    """One replica's lease and what its engine knows of it. `next` says what to do, one at a time.

    `life` counts the engine's lives: an answer of an earlier life says nothing about this one.
    """

    def __init__(self) -> None:
        self.held = HeldLease()
        self.life = 0
        self._engine_up = False
        self._admitted: int | None = None
        self._ending: _Ending | None = None

    @property
    def vacant(self) -> bool:
        """Whether the engine runs nobody's turns."""
        return self._admitted is None

    def engine_up(self, epoch: int = 0, admitting: bool = False) -> None:
        """An engine answers. `epoch`: the newest lease that it knows of, 0 when it is new.

        One that admits already does so for a lease of an earlier daemon's, which is over: streams
        that a lease is renewed on end with the daemon.
        """
        self.life += 1
        self._engine_up = True
        self._admitted = epoch if admitting else None
        self.held.end(epoch)
        if admitting:
            self._ending = _Ending(epoch, ADOPTED, asked=False)

    def engine_down(self) -> None:
        """The engine ended, and its turns with it."""
        self._engine_up = False
        self._admitted = None

    def grant(self, epoch: int, ttl_s: float, now_s: float) -> None:
        """The scheduler granted or renewed the lease."""
        self.held.grant(epoch, ttl_s, now_s)

    def release(self, epoch: int, reason: str) -> None:
        """The scheduler wants the lease to end."""
        if self.held.end(epoch):
            self._ending = _Ending(epoch, reason, asked=True)

    def take_back(self, reason: str) -> Revoked | None:
        """The node wants the lease to end; what to tell the scheduler, None without a lease."""
        if not self.held.open:
            return None
        epoch = self.held.epoch
        self.held.end(epoch)
        self._ending = _Ending(epoch, reason, asked=False)
        return Revoked(epoch, reason)

    def admitted(self, epoch: int, life: int) -> None:
        """The engine opened its admission."""
        if life == self.life and self._engine_up:
            self._admitted = epoch

    def drained(self, life: int) -> None:
        """The engine closed its admission, or is past answering and frozen."""
        if life == self.life:
            self._admitted = None

    def next(self, now_s: float, aborted: int = 0) -> Step | None:
        """What to do now; None when all is as it should be. `aborted`: turns ended by a drain."""
        if self.held.open and not self._engine_up:
            return self.take_back(ENGINE_DOWN)
        if self.held.open and not self.held.active(now_s):
            return self.take_back(EXPIRED)
        if self._ending is not None:
            ending = self._ending
            if self._admitted is not None:
                return Drain(ending.epoch, ending.reason)
            self._ending = None
            return Ended(ending.epoch, ending.reason, aborted, ending.asked)
        if self.held.open and self._admitted != self.held.epoch:
            return Admit(self.held.epoch)
        return None

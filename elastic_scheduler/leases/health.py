"""Health of a replica: decides whether it may get turns.

    STARTING --alive--> SYNCING --within the bound--> HEALTHY <--failed / served--> SUSPECT
                           ^-------- missed a version --+-------------------------------+
    any but QUARANTINED -- silent for dead_s, failed too often, its node says so --> DEAD
    any -- a version was not proven --> QUARANTINED
    DEAD, QUARANTINED -- restarted under a greater epoch --> STARTING

Only HEALTHY gets turns. A replica that fell silent may be a stopped process: what it says when it
wakes up is void until its lease was granted anew, under a greater epoch.
"""

from dataclasses import dataclass
from enum import StrEnum

from elastic_scheduler.rollouts.admission import StalenessBound


class Health(StrEnum):
    """HEALTHY gets turns; the others say what is missing."""

    STARTING = "starting"
    SYNCING = "syncing"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Silence until a replica is doubted and given up, and failures in a row that end it."""

    suspect_s: float = 2.0
    dead_s: float = 5.0
    failures: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.suspect_s <= self.dead_s or self.failures < 1:
            raise ValueError("health needs 0 < suspect_s <= dead_s and at least one failure")


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Report on a replica at one moment; `epoch` is that of the lease it works under."""

    alive: bool
    policy_version: int
    latest_version: int
    epoch: int = 0


class ReplicaHealth:
    """One replica's state; times are monotonic seconds, handed in."""

    def __init__(
        self, bound: StalenessBound, now_s: float, limits: HealthLimits | None = None
    ) -> None:
        self._bound = bound
        self._limits = limits or HealthLimits()
        self._heard_s = now_s
        self._epoch = 0
        self._leased_epoch = 0
        self._failures = 0
        self._doubted_until_s = now_s
        # What comes under this epoch or an older one is void.
        self._void_epoch = -1
        self.state = Health.STARTING

    @property
    def takes_turns(self) -> bool:
        """Whether turns may be sent to it."""
        return self.state is Health.HEALTHY

    def set_bound(self, bound: StalenessBound) -> None:
        """The job allows another staleness; it counts from the next report."""
        self._bound = bound

    def leased(self, epoch: int) -> None:
        """A lease was granted, which the replica may have seen when it falls silent."""
        self._leased_epoch = max(self._leased_epoch, epoch)

    def restarted(self, epoch: int, now_s: float) -> bool:
        """A new engine, or a new lease of it: begins anew. False for an epoch that is void."""
        if epoch <= self._void_epoch or epoch < self._epoch:
            return False
        self._epoch, self._heard_s, self._failures = epoch, now_s, 0
        self._void_epoch = epoch - 1
        self.state = Health.STARTING
        return True

    def heard(self, report: HealthReport, now_s: float) -> Health:
        """The replica's node spoke. What a process of an older epoch says changes nothing."""
        if report.epoch < self._epoch or report.epoch <= self._void_epoch:
            return self.state
        self._epoch, self._heard_s = report.epoch, now_s
        if self.state is Health.QUARANTINED:
            return self.state
        if not report.alive:
            self.state = self.state if self.state is Health.STARTING else Health.DEAD
        elif not self._caught_up(report):
            self.state = Health.SYNCING
        elif self.state is not Health.SUSPECT or now_s >= self._doubted_until_s:
            # Its node is the authority over life: an engine that it calls alive again is a new one.
            self.state = Health.HEALTHY
        return self.state

    def failed(self, now_s: float) -> Health:
        """A turn failed there, or stalled."""
        self._failures += 1
        # It gets no turns by which to prove itself: the doubt has to end by itself.
        self._doubted_until_s = now_s + self._limits.suspect_s
        if self.state in (Health.HEALTHY, Health.SUSPECT):
            dead = self._failures >= self._limits.failures
            self.state = Health.DEAD if dead else Health.SUSPECT
            if dead:
                self._void_epoch = self._epoch
        return self.state

    def served(self, now_s: float) -> Health:
        """Tokens came from it: an earlier failure was not its end."""
        self._failures = 0
        if self.state is Health.SUSPECT:
            self.state, self._heard_s = Health.HEALTHY, now_s
        return self.state

    def quarantine(self) -> None:
        """A version was applied and not proven: only a new engine helps."""
        self._void_epoch = self._epoch
        self.state = Health.QUARANTINED

    def silenced(self) -> None:
        """It was silent for too long: what it was leased under, seen or not, is void."""
        if self.state is not Health.QUARANTINED:
            self.state = Health.DEAD
        self._void_epoch = max(self._void_epoch, self._epoch, self._leased_epoch)

    def tick(self, now_s: float) -> Health:
        """Time passed."""
        silent_s = now_s - self._heard_s
        if self.state in (Health.DEAD, Health.QUARANTINED):
            return self.state
        if silent_s >= self._limits.dead_s:
            self.silenced()
        elif silent_s >= self._limits.suspect_s and self.state is Health.HEALTHY:
            self.state = Health.SUSPECT
        return self.state

    def _caught_up(self, report: HealthReport) -> bool:
        """One ahead of every announced version runs weights that are not this job's."""
        if report.policy_version > report.latest_version:
            return False
        return self._bound.admits_token(report.policy_version, report.latest_version)

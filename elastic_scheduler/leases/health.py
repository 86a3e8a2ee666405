"""Health of a replica: decides whether it may get turns.

    STARTING --alive--> SYNCING <--within the bound, missed a version--> HEALTHY
    any -- its node says so --> DEAD -- its node calls it alive --> SYNCING, HEALTHY
    any -- silent for longer than its offers live --> DEAD, and its reports are void
    DEAD -- leased anew, under a greater epoch --> STARTING

Only HEALTHY gets turns. A replica that fell silent may be a stopped process: its reports after it
wakes up are void until it is leased anew, under a greater epoch.
"""

from dataclasses import dataclass
from enum import StrEnum

from elastic_scheduler.rollouts.admission import StalenessBound


class Health(StrEnum):
    """HEALTHY gets turns; the others name the missing part."""

    STARTING = "starting"
    SYNCING = "syncing"
    HEALTHY = "healthy"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Report on a replica at one moment; `epoch` is that of the lease it works under.

    foreign: the weights that it holds are not those of the job that it is judged for.
    """

    alive: bool
    policy_version: int
    latest_version: int
    epoch: int = 0
    foreign: bool = False


class ReplicaHealth:
    """One replica's state. It knows no time: its node's offers set the bound on silence."""

    def __init__(self, bound: StalenessBound) -> None:
        self._bound = bound
        self._epoch = 0
        self._leased_epoch = 0
        # Reports under this epoch or an older one are void.
        self._void_epoch = -1
        self.state = Health.STARTING

    @property
    def takes_turns(self) -> bool:
        """True if turns may be sent to it."""
        return self.state is Health.HEALTHY

    def set_bound(self, bound: StalenessBound) -> None:
        """Set another bound on staleness; it counts from the next report."""
        self._bound = bound

    def leased(self, epoch: int) -> None:
        """Record a lease, which the replica may have seen when it falls silent."""
        self._leased_epoch = max(self._leased_epoch, epoch)

    def restarted(self, epoch: int) -> bool:
        """Begin anew for a new engine or lease; return False for a void epoch."""
        if epoch <= self._void_epoch or epoch < self._epoch:
            return False
        self._epoch = epoch
        self._void_epoch = epoch - 1
        self.state = Health.STARTING
        return True

    def heard(self, report: HealthReport) -> Health:
        """Take a report of the replica's node; one of an older epoch changes nothing."""
        if report.epoch < self._epoch or report.epoch <= self._void_epoch:
            return self.state
        self._epoch = report.epoch
        # Its node is the authority over life: an engine that it calls alive again is a new one.
        if report.alive:
            self.state = Health.HEALTHY if self._caught_up(report) else Health.SYNCING
        elif self.state is not Health.STARTING:
            self.state = Health.DEAD
        return self.state

    def silenced(self) -> None:
        """Void all its leases, seen or not, after too long a silence."""
        self.state = Health.DEAD
        self._void_epoch = max(self._void_epoch, self._epoch, self._leased_epoch)

    def _caught_up(self, report: HealthReport) -> bool:
        """A replica ahead of every announced version runs weights that are not this job's."""
        if report.foreign or report.policy_version > report.latest_version:
            return False
        return self._bound.admits_token(report.policy_version, report.latest_version)

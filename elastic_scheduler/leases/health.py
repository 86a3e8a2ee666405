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
    """Health of a replica. HEALTHY: may get turns. STARTING: its engine is not up yet.

    SYNCING: its weights are too old or another job's. DEAD: it is down or silent.
    """

    STARTING = "starting"
    SYNCING = "syncing"
    HEALTHY = "healthy"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Report of a replica's node: liveness, weight version, and epoch of the replica's lease.

    foreign: the replica's weights are another job's than the one that it is judged for.
    """

    alive: bool
    policy_version: int
    latest_version: int
    epoch: int = 0
    foreign: bool = False


class ReplicaHealth:
    """Health state machine of one replica, without a clock: its driver reports silence."""

    def __init__(self, bound: StalenessBound) -> None:
        self._bound = bound
        self._epoch = 0
        self._leased_epoch = 0
        # Reports under this epoch or an older one are void.
        self._void_epoch = -1
        self.state = Health.STARTING

    @property
    def takes_turns(self) -> bool:
        """True if the state is HEALTHY, so that turns may be sent to the replica."""
        return self.state is Health.HEALTHY

    def set_bound(self, bound: StalenessBound) -> None:
        """Set the limit on versions behind the newest; it counts from the next report."""
        self._bound = bound

    def leased(self, epoch: int) -> None:
        """Record a lease's epoch: if the replica falls silent, reports under it become void."""
        self._leased_epoch = max(self._leased_epoch, epoch)

    def restarted(self, epoch: int) -> bool:
        """Set the state to STARTING for a new lease or engine; return False for a void epoch."""
        if epoch <= self._void_epoch or epoch < self._epoch:
            return False
        self._epoch = epoch
        self._void_epoch = epoch - 1
        self.state = Health.STARTING
        return True

    def heard(self, report: HealthReport) -> Health:
        """Update the replica's health from its node's report and return it; a report of an older or
        voided epoch changes nothing.
        """
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
        """Set the state to DEAD and void all reports under epochs up to the newest lease."""
        self.state = Health.DEAD
        self._void_epoch = max(self._void_epoch, self._epoch, self._leased_epoch)

    def _caught_up(self, report: HealthReport) -> bool:
        """Return True if the weights are this job's and recent enough.

        A replica ahead of every announced version has weights that are not this job's.
        """
        if report.foreign or report.policy_version > report.latest_version:
            return False
        return self._bound.admits_token(report.policy_version, report.latest_version)

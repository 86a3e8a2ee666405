"""The scheduler: leases the nodes' offers to the job, and publishes which replica may be used."""

from rose.scheduler.core import SchedulerCore
from rose.scheduler.service import SchedulerService
from rose.scheduler.state.leasing import LeaseTimes

__all__ = ["LeaseTimes", "SchedulerCore", "SchedulerService"]

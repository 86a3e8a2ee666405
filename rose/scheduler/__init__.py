"""The scheduler: leases what nodes offer to the job, and tells everybody who may use what."""

from rose.scheduler.core import SchedulerCore
from rose.scheduler.leasing import LeaseTimes
from rose.scheduler.service import SchedulerService

__all__ = ["LeaseTimes", "SchedulerCore", "SchedulerService"]

"""The scheduler: leases what nodes offer to the job, and tells everybody who may use what."""

from rose.scheduler.core import SchedulerCore
from rose.scheduler.service import SchedulerService
from rose.scheduler.state.leasing import LeaseTimes

__all__ = ["LeaseTimes", "SchedulerCore", "SchedulerService"]

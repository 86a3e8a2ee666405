"""Base of ROSE's schedulers on vLLM: asynchronous exactly if the engine schedules so.

vLLM schedules asynchronously only with a class derived from AsyncScheduler, and takes its plain
Scheduler elsewhere (pipeline parallelism, n-gram drafts, --no-async-scheduling). There an
AsyncScheduler would schedule a token before the one before it is known.
"""

from types import MethodType

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class ConfiguredScheduler(AsyncScheduler):  # type: ignore[misc] # vLLM's types are not ours to check
    """Scheduler of vLLM, asynchronous exactly if the configuration has `async_scheduling`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            # These run for each request of a step: nothing stands between where most hosts are.
            for name in ("_update_after_schedule", "_update_request_with_output"):
                setattr(self, name, MethodType(getattr(Scheduler, name), self))

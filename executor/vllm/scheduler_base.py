"""Base of ROSE's schedulers on vLLM: asynchronous exactly if the engine schedules so.

vLLM schedules asynchronously only with a class derived from AsyncScheduler, and takes its plain
Scheduler elsewhere (pipeline parallelism, n-gram drafts, --no-async-scheduling). There an
AsyncScheduler would schedule a token before the one before it is known.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class ConfiguredScheduler(AsyncScheduler):  # type: ignore[misc] # vLLM's types are not ours to check
    """Scheduler of vLLM, asynchronous exactly if the configuration has `async_scheduling`."""

    def _update_after_schedule(self, *args: object, **kwargs: object) -> None:
        self._configured()._update_after_schedule(self, *args, **kwargs)

    def _update_request_with_output(self, *args: object, **kwargs: object) -> object:
        return self._configured()._update_request_with_output(self, *args, **kwargs)

    def _configured(self) -> Any:  # noqa: ANN401 -- vLLM's type
        return AsyncScheduler if self.scheduler_config.async_scheduling else Scheduler

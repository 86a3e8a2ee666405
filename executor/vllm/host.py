"""`--scheduler-cls executor.vllm.host.ObservedScheduler`: stock scheduling, published.

The host never depends on ROSE: whatever goes wrong in here is logged once, and from then on the
scheduler is the stock one.
"""

import logging
import os
import time
from collections.abc import Callable

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from executor.control_page import ControlPage
from executor.errors import PageError
from executor.step_log import StepLog
from executor.vllm.observer import HostObserver
from executor.vllm.settings import HOST, EngineSettings
from executor.vllm.surfaces import RequestSurface, StepSurface

# vLLM shows what its own loggers' children say.
logger = logging.getLogger("vllm.rose.host")
SERVES_ON = "the host is no longer published; it serves on without ROSE"


class ObservedScheduler(AsyncScheduler):  # type: ignore[misc] # vLLM's types are not ours to check
    """Publishes the host section at every change of queue and step; inert unless ROSE_ROLE=host.

    AsyncScheduler is the base because a plain Scheduler would switch asynchronous scheduling off
    where the platform has it; where it has not (CPU), it behaves as Scheduler does.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._observer: HostObserver | None = None
        self._quietly(self._attach)

    def schedule(self, *args: object, **kwargs: object) -> object:
        """Schedule as vLLM does, then publish the step."""
        began_ns = time.monotonic_ns()
        output = super().schedule(*args, **kwargs)
        if self._observer is not None:
            self._quietly(self._observer.scheduled, self, output, began_ns)
        return output

    def update_from_output(
        self, scheduler_output: StepSurface, model_runner_output: object
    ) -> object:
        """Process a step's output as vLLM does, then publish what is left."""
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._observer is not None:
            self._quietly(self._observer.stepped, self, scheduler_output)
        return result

    def add_request(self, request: RequestSurface) -> None:
        """Add a request as vLLM does, then publish that the host is no longer idle."""
        super().add_request(request)
        if self._observer is not None:
            self._quietly(self._observer.arrived, self, request)

    def finish_requests(self, *args: object, **kwargs: object) -> object:
        """Abort requests as vLLM does, then publish what is left."""
        result = super().finish_requests(*args, **kwargs)
        if self._observer is not None:
            self._quietly(self._observer.ended, self)
        return result

    def _attach(self) -> None:
        settings = EngineSettings.from_environ(os.environ)
        if settings.role == HOST:
            page = ControlPage.ensure(settings.page_path)
            log = StepLog.from_environ(os.environ, HOST)
            self._observer = HostObserver(page, settings.ttft_s, settings.tpot_s, step_log=log)
            self._observer.started(self)

    def _quietly(self, observe: Callable[..., None], *args: object) -> None:
        try:
            observe(*args)
        except PageError as error:
            self._observer = None
            logger.error("%s: %s", SERVES_ON, error)  # noqa: TRY400 -- the message says it all
        except Exception:
            self._observer = None
            logger.exception(SERVES_ON)

"""The scheduler of a vLLM host: stock scheduling, published; `executor.vllm.host.plugin` sets it.

With ROSE_HOST_LEVEL=lend it also lends idle KV memory. `executor.host.plugin` handles every error:
the host serves on as the stock engine.
"""

import logging
import time
from collections.abc import Collection
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from executor.engine_settings import EngineSettings
from executor.errors import LendingError
from executor.host.kv_lender import HostLender
from executor.host.plugin import HostPlugin, lending_limits
from executor.vllm.compat import (
    VERSIONS,
    RequestSurface,
    StepSurface,
    check_version,
    decodes_only,
    own_devices,
)
from executor.vllm.host.kv_lender import lender_of
from executor.vllm.host.plugin import engine_core_of
from executor.vllm.host.state_publisher import DecodeStatePublisher, HostStatePublisher
from executor.vllm.rank_worker import carry
from executor.vllm.scheduler_base import ConfiguredScheduler
from executor.vllm.surfaces import HOST


class ObservedScheduler(HostPlugin[HostStatePublisher], ConfiguredScheduler):
    """Scheduler of a host: vLLM's own, which publishes on the page and may lend KV memory.

    Inert unless ROSE_ROLE=host. With a diffusion model the class makes vLLM's own scheduler of such
    models, and nothing is published.
    """

    # vLLM shows the lines of its own loggers' children.
    log = logging.getLogger("vllm.rose.host")
    publisher: type[HostStatePublisher] = HostStatePublisher
    running: list[Any]
    _pause_state: PauseState

    def __new__(cls, vllm_config: Any, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        if getattr(vllm_config, "diffusion_config", None) is None:
            return super().__new__(cls)
        from vllm.v1.core.sched import diffusion_scheduler

        cls.log.warning("a diffusion model's host is not observed; it serves on without ROSE")
        name = "Async" * bool(vllm_config.scheduler_config.async_scheduling)
        # Some versions have the asynchronous one alone.
        asynchronous = diffusion_scheduler.DiffusionAsyncScheduler
        stock = getattr(diffusion_scheduler, f"Diffusion{name}Scheduler", asynchronous)
        return stock(vllm_config, *args, **kwargs)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if decodes_only(self.vllm_config):
            self.publisher = DecodeStatePublisher
        self.attach()

    def schedule(self, *args: object, **kwargs: object) -> object:
        """Lend or take back memory, schedule as vLLM does, publish the step, and return it."""
        began_ns = time.monotonic_ns()
        self._lend()
        if held := self._held_back():
            output = self._schedule_without(held, args, kwargs)
        else:
            output = super().schedule(*args, **kwargs)
        if self._lender is not None:
            carry(output, self._lender.pool.pages)
            if output.total_num_scheduled_tokens:
                self._lender.step_begun()
        if self._observer is not None:
            self._quietly(self._observer.scheduled, output, began_ns)
        return output

    def update_from_output(
        self, scheduler_output: StepSurface, model_runner_output: object
    ) -> object:
        """Process a step's output as vLLM does, then publish the remaining requests."""
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._lender is not None and scheduler_output.total_num_scheduled_tokens:
            self._lender.step_done()
        if self._observer is not None:
            self._quietly(self._observer.stepped, scheduler_output)
        return result

    def add_request(self, request: RequestSurface) -> None:
        """Add a request as vLLM does, then publish that the host is no longer idle."""
        super().add_request(request)
        if self._observer is not None:
            self._quietly(self._observer.arrived, request)
            self._lend(arrived=True)

    def finish_requests(self, *args: object, **kwargs: object) -> object:
        """Abort requests as vLLM does, then publish the remaining ones."""
        result = super().finish_requests(*args, **kwargs)
        if self._observer is not None:
            self._quietly(self._observer.ended)
        return result

    def has_requests(self) -> bool:
        """Return True if there are requests, or an idle host has more to lend in empty steps.

        Lending it all at once would keep a request waiting that arrives meanwhile.
        """
        return super().has_requests() or (self._lender is not None and self._lender.pending)

    def shutdown(self) -> None:
        """Shut down as vLLM does, then release the page's seat, for its next host."""
        super().shutdown()
        self._quietly(self._leave)

    def _check(self) -> tuple[str, str]:
        return VERSIONS.installed, check_version(HOST)

    @property
    def _core(self) -> tuple[int, int]:
        return engine_core_of(self.vllm_config.parallel_config)

    def _make_lender(self, settings: EngineSettings) -> HostLender:
        if settings.page_socket and self._core[1] > 1:
            raise LendingError("engine cores cannot share a page socket; unset ROSE_PAGE_SOCKET")
        return lender_of(self, lending_limits(settings), settings.kv_backend)

    def _identity(self) -> tuple[str, tuple[str, ...]]:
        model = self.vllm_config.model_config
        names = model.served_model_name or model.model
        ranks = self.vllm_config.parallel_config.world_size * self._core[1]
        return names if isinstance(names, str) else names[0], own_devices(ranks)

    def _demand(self) -> tuple[int, int]:
        next_tokens = self.waiting.peek_request().num_tokens if self.waiting else 0
        return sum(self.get_request_counts()), next_tokens

    def _held_back(self) -> Collection[str]:
        if self._lender is None:
            return ()
        try:
            return self._lender.held_back(self.running)
        except Exception as error:  # noqa: BLE001 -- the host serves on
            self.stop_lending(error)
            return ()

    def _schedule_without(
        self, held: Collection[str], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> StepSurface:
        """Schedule as if the `held` running requests had no work, and no request were waiting.

        The free blocks are for the running ones, and a newcomer would take them.
        """
        running, paused = self.running, self._pause_state
        self.running = [request for request in running if request.request_id not in held]
        self._pause_state = PauseState.PAUSED_NEW
        try:
            output: StepSurface = super().schedule(*args, **kwargs)
        finally:
            self._pause_state = paused
            stayed = {request.request_id for request in self.running} | set(held)
            self.running = [request for request in running if request.request_id in stayed]
        return output

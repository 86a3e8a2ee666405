"""`--scheduler-cls executor.vllm.host.scheduler.ObservedScheduler`: stock scheduling, published.

With ROSE_HOST_LEVEL=lend it also lends idle KV memory. The host never depends on ROSE: whatever
goes wrong in here is logged once, and from then on the scheduler is the stock one. A host that does
not publish vetoes the guests of its page for as long as it lives.
"""

import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState

from executor.control_page.host_description import HostDescription
from executor.control_page.host_seat import HostSeat, Veto
from executor.control_page.page import ControlPage
from executor.errors import ExecutorError, PageError
from executor.kv.capacity_policy import LendingLimits
from executor.step_log import StepLog
from executor.vllm.compat import RequestSurface, StepSurface, check_version, own_devices
from executor.vllm.host.kv_lender import HostLender, KvLent
from executor.vllm.host.state_publisher import HostStatePublisher
from executor.vllm.settings import HOST, LEND, EngineSettings, page_path_of

# vLLM shows what its own loggers' children say.
logger = logging.getLogger("vllm.rose.host")
SERVES_ON = "the host is no longer published; it serves on without ROSE"
KEEPS = "KV memory is not lent; the host serves on with its whole pool"


def lending_limits(settings: EngineSettings) -> LendingLimits:
    """Return what the operator lets a host lend."""
    return LendingLimits(settings.reserve, cold_ns=round(settings.prefix_cold_s * 1e9))


class ObservedScheduler(AsyncScheduler):  # type: ignore[misc] # vLLM's types are not ours to check
    """Publishes the host section at every change of queue and step; inert unless ROSE_ROLE=host.

    AsyncScheduler is the base because a plain Scheduler would switch asynchronous scheduling off
    where the platform has it; where it has not (CPU), it behaves as Scheduler does.
    """

    running: list[Any]
    _pause_state: PauseState

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._observer: HostStatePublisher | None = None
        self._lender: HostLender | None = None
        self._seat: HostSeat | None = None
        self._veto: Veto | None = None
        self.attach()

    @property
    def observer(self) -> HostStatePublisher | None:
        """The publisher of its state, None while it is the stock scheduler."""
        return self._observer

    @property
    def lender(self) -> HostLender | None:
        """The owner of its balloon, None while nothing is or stays lent."""
        return self._lender

    def attach(self) -> None:
        """Publish on the page that the environment names; whatever fails, the host serves on."""
        self._observer = None
        self._quietly(self._attach)

    def give_up(self) -> None:
        """Publish and lend no more: schedule as vLLM does, and veto the guests of the page."""
        self._observer = None
        # Memory of which nobody hears helps nobody.
        self.stop_lending()
        try:
            if self._seat is not None:
                self._seat.cease()
        except Exception:  # noqa: BLE001 -- what failed just now may fail again
            logger.warning("its last state stays on the control page; it is not believed for long")
        path = _page_path()
        if self._veto is None and path and os.environ.get("ROSE_ROLE") == HOST:
            self._veto = Veto(Path(path))
            self._veto.start()

    def stop_lending(self, why: Exception | None = None) -> None:
        """Take back what is lent, and serve on with the whole pool; on a GPU that takes steps."""
        lender = self._lender
        if lender is None:
            return
        if why is not None:
            logger.error("%s: %s", KEEPS, why)
        try:
            lender.stop(why)
        except Exception:
            logger.exception("%s, as far as it came back", KEEPS)
            self._lender = None
        else:
            if lender.over:
                self._lender = None

    def schedule(self, *args: object, **kwargs: object) -> object:
        """Schedule as vLLM does, then publish the step."""
        began_ns = time.monotonic_ns()
        self._lend()
        if held := self._held_back():
            output = self._schedule_without(held, args, kwargs)
        else:
            output = super().schedule(*args, **kwargs)
        if self._lender is not None and output.total_num_scheduled_tokens:
            self._lender.step_begun()
        if self._observer is not None:
            self._quietly(self._observer.scheduled, self, output, began_ns)
        return output

    def update_from_output(
        self, scheduler_output: StepSurface, model_runner_output: object
    ) -> object:
        """Process a step's output as vLLM does, then publish what is left."""
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._lender is not None and scheduler_output.total_num_scheduled_tokens:
            self._lender.step_done()
        if self._observer is not None:
            self._quietly(self._observer.stepped, self, scheduler_output)
        return result

    def add_request(self, request: RequestSurface) -> None:
        """Add a request as vLLM does, then publish that the host is no longer idle."""
        super().add_request(request)
        if self._observer is not None:
            self._quietly(self._observer.arrived, self, request)
            self._lend(arrived=True)

    def finish_requests(self, *args: object, **kwargs: object) -> object:
        """Abort requests as vLLM does, then publish what is left."""
        result = super().finish_requests(*args, **kwargs)
        if self._observer is not None:
            self._quietly(self._observer.ended, self)
        return result

    def has_requests(self) -> bool:
        """Also True while an idle host has more to lend: in empty steps, between which it listens.

        Lending it all at once would keep a request waiting that arrives meanwhile.
        """
        return super().has_requests() or (self._lender is not None and self._lender.pending)

    def shutdown(self) -> None:
        """Shut down as vLLM does, then leave the page to whoever is its host next."""
        super().shutdown()
        self._quietly(self._leave)

    def _attach(self) -> None:
        settings = EngineSettings.from_environ(os.environ)
        if settings.role == HOST:
            check_version()
            _insist_alone(self.vllm_config.parallel_config)
            page, seat = _seated(settings)
            self._seat = seat
            log = StepLog.from_environ(os.environ, HOST)
            if settings.level == LEND:
                self._begin_lending(settings)
            self._observer = HostStatePublisher(
                seat,
                settings.ttft_s,
                settings.tpot_s,
                step_log=log,
                lent=self._lent,
                blocks_away=self._blocks_away,
            )
            self._observer.started(self)
            seat.start()
            if settings.found:
                # Last: a node may start a guest once it has found this.
                said = description_of(self.vllm_config, settings, seat.taken_ns)
                said.write(page.path, settings.page_group)

    def _leave(self) -> None:
        seat, self._seat, self._observer = self._seat, None, None
        veto, self._veto = self._veto, None
        for held in (seat, veto):
            if held is not None:
                held.close()

    def _begin_lending(self, settings: EngineSettings) -> None:
        try:
            self._lender = HostLender.of(self, lending_limits(settings), settings.kv_backend)
        except Exception as error:  # noqa: BLE001 -- the host is worth more than what it lends
            logger.error("%s: %s", KEEPS, error)  # noqa: TRY400 -- one line says it all

    def _lend(self, *, arrived: bool = False) -> None:
        lender, observer = self._lender, self._observer
        if lender is None:
            return
        before = lender.lent
        tokens = observer.queued_prefill_tokens if observer is not None else 0
        try:
            requests = sum(self.get_request_counts())
            if arrived:
                lender.arrived(tokens, requests)
            else:
                next_tokens = self.waiting.peek_request().num_tokens if self.waiting else 0
                lender.step(tokens, requests, next_tokens)
        except Exception as error:  # noqa: BLE001 -- as above
            self.stop_lending(error)
        if lender.over:
            self._lender = None
        if observer is not None and self._lent() != before:
            self._quietly(observer.lends, self)

    def _held_back(self) -> Collection[str]:
        if self._lender is None:
            return ()
        try:
            return self._lender.held_back(self.running)
        except Exception as error:  # noqa: BLE001 -- as above
            self.stop_lending(error)
            return ()

    def _lent(self) -> KvLent:
        return self._lender.lent if self._lender is not None else KvLent()

    def _blocks_away(self) -> int:
        return self._lender.blocks_away if self._lender is not None else 0

    def _schedule_without(
        self, held: Collection[str], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> StepSurface:
        """Schedule as if these running requests had nothing to do, and nobody were waiting: what is
        free now is for those who run, and a newcomer would take it."""
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

    def _quietly(self, observe: Callable[..., None], *args: object) -> None:
        try:
            observe(*args)
        except ExecutorError as error:
            self.give_up()
            logger.error("%s: %s", SERVES_ON, error)  # noqa: TRY400 -- the message says it all
        except Exception:
            self.give_up()
            logger.exception(SERVES_ON)


def _seated(settings: EngineSettings) -> tuple[ControlPage, HostSeat]:
    page = ControlPage.ensure(settings.page_path, settings.page_group)
    try:
        return page, page.take_host()
    except PageError:
        if not page.replaced:
            raise
    # A node swept what an earlier life left, just before the lock was taken.
    page = ControlPage.ensure(settings.page_path, settings.page_group)
    return page, page.take_host()


def description_of(config: Any, settings: EngineSettings, seated_ns: int) -> HostDescription:  # noqa: ANN401 -- vLLM's VllmConfig
    """Return what a node must know of this engine to run a guest beside it."""
    model = config.model_config
    names = model.served_model_name or model.model
    return HostDescription(
        model=(names if isinstance(names, str) else names[0])[-253:],
        ttft_s=settings.ttft_s,
        tpot_s=settings.tpot_s,
        devices=own_devices(config.parallel_config.world_size),
        seated_ns=seated_ns,
    )


def _page_path() -> str:
    try:
        return page_path_of(os.environ)
    except PageError:
        return ""  # Where it has no page no guest can run by it.


def _insist_alone(parallel: Any) -> None:  # noqa: ANN401 -- vLLM's ParallelConfig
    """Refuse an engine core that is one of several; a dense model's ranks call their number 1."""
    ranks, rank = parallel.data_parallel_size, getattr(parallel, "data_parallel_index", 0)
    if ranks > 1 or rank > 0:
        raise PageError(
            f"this is rank {rank} of a host with data_parallel_size {max(ranks, rank + 1)}: its"
            " engine cores cannot share a page; start each as a server of its own with its own page"
        )

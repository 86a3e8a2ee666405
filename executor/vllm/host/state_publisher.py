"""Publisher of a vLLM host's state: the scheduler's work as the control page's host section."""

import time
from collections.abc import Callable

from executor.control_page.host_seat import HostSeat
from executor.deadline_tracker import DeadlineTracker
from executor.host.kv_lender import KvLent
from executor.host.state_publisher import StatePublisher
from executor.step_log import StepLog
from executor.vllm.compat import RequestSurface, SchedulerSurface, StepSurface


class HostStatePublisher(StatePublisher):
    """Publisher called by the scheduler at each turn of its loop.

    A schedule() without news waits for the end of its step.
    """

    def __init__(
        self,
        seat: HostSeat,
        ttft_s: float,
        tpot_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_s: Callable[[], float] = time.time,
        step_log: StepLog | None = None,
        lent: Callable[[], KvLent] = KvLent,
        blocks_away: Callable[[], int] = int,
    ) -> None:
        """blocks_away: returns the part of the loan that vLLM's pool does not count."""
        book = DeadlineTracker(round(ttft_s * 1e9), round(tpot_s * 1e9))
        super().__init__(seat, book, clock_ns, step_log, lent)
        self._blocks_away = blocks_away
        self._wall_s = wall_s

    def started(self, scheduler: SchedulerSurface) -> None:
        """Publish the idle host: its guest may run before the first request comes."""
        self._publish(scheduler, self._clock_ns())

    def arrived(self, scheduler: SchedulerSurface, request: RequestSurface) -> None:
        """Add a request."""
        now_ns = self._clock_ns()
        # vLLM stamps arrivals with the wall clock; a jump of it must not move a deadline forward.
        age_ns = max(0, round((self._wall_s() - request.arrival_time) * 1e9))
        self._deadlines.arrived(request.request_id, now_ns - age_ns, request.num_prompt_tokens)
        self._untold = True
        if self._told_idle:
            self._publish(scheduler, now_ns)
            # Its arrival is published; that it runs from now on is not.
            self._untold = True
        if self._step_log is not None:
            self._step_log.arrival(now_ns - age_ns, now_ns, request.num_prompt_tokens)

    def scheduled(self, scheduler: SchedulerSurface, output: StepSurface, began_ns: int) -> None:
        """Record that schedule() made `output`; it was entered at `began_ns`."""
        if output.total_num_scheduled_tokens:
            self._step_begins(began_ns)
            self._deadlines.begun([new.req_id for new in output.scheduled_new_reqs])
        if self._untold:
            self._publish(scheduler, self._clock_ns())

    def stepped(self, scheduler: SchedulerSurface, output: StepSurface) -> None:
        """Record that update_from_output() is done with `output`."""
        now_ns = self._clock_ns()
        if output.total_num_scheduled_tokens:
            requests = scheduler.requests
            self._deadlines.stepped(
                now_ns, output.num_scheduled_tokens, lambda id_: _has_token(requests.get(id_))
            )
            self._step_ends(
                now_ns, output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
            )
        if scheduler.finished_req_ids:
            self._deadlines.finished(scheduler.finished_req_ids)
        self._untold = self._steps_in_flight > 0
        if not self._untold:
            self._publish(scheduler, now_ns)

    def lends(self, scheduler: SchedulerSurface) -> None:
        """Publish a changed loan."""
        self._publish(scheduler, self._clock_ns())

    def ended(self, scheduler: SchedulerSurface) -> None:
        """Remove requests that were finished from outside (aborted)."""
        self._deadlines.finished(scheduler.finished_req_ids)
        self._publish(scheduler, self._clock_ns())

    def _publish(self, scheduler: SchedulerSurface, now_ns: int) -> None:
        running, waiting = scheduler.get_request_counts()
        pool = scheduler.kv_cache_manager.block_pool
        counted = pool.num_gpu_blocks - 1  # Block 0 is the null block.
        used = counted - pool.get_num_free_blocks()
        self._tell(now_ns, running, waiting, used, counted + self._blocks_away())


def _has_token(request: RequestSurface | None) -> bool:
    # A request that is gone has finished, so it had its first token.
    return request is None or request.num_output_tokens > 0

"""Publisher of a vLLM host's state: the scheduler's work as the control page's host section."""

import time
from collections.abc import Callable
from typing import Any, ClassVar

from executor.control_page.host_seat import HostSeat
from executor.host.state_publisher import StatePublisher
from executor.vllm.compat import RequestSurface, SchedulerSurface, StepSurface


class HostStatePublisher(StatePublisher):
    """Publisher of a vLLM host, called by its scheduler at each turn of the engine's loop.

    A schedule() without news waits for the end of its step.
    """

    wall_s: Callable[[], float] = staticmethod(time.time)
    prefills: ClassVar[bool] = True
    """False for a host whose prompts other hosts compute."""
    _scheduler: SchedulerSurface

    def arrived(self, request: RequestSurface) -> None:
        """Record a new request, and publish at once if the host was idle."""
        now_ns = self._clock_ns()
        # vLLM stamps arrivals with the wall clock; a jump of it must not move a deadline forward.
        age_ns = max(0, round((self.wall_s() - request.arrival_time) * 1e9))
        arrived_ns, prompt_tokens = now_ns - age_ns, request.num_prompt_tokens
        queued = prompt_tokens if self.prefills else 0
        self._deadlines.arrived(request.request_id, arrived_ns, queued)
        self._arrives(now_ns, arrived_ns, prompt_tokens)

    def scheduled(self, output: StepSurface, began_ns: int) -> None:
        """Record that schedule() returned `output`; it was entered at `began_ns`."""
        if output.total_num_scheduled_tokens:
            self._step_begins(began_ns)
            self._deadlines.begun([new.req_id for new in output.scheduled_new_reqs])
        self._publish_begun()

    def stepped(self, output: StepSurface) -> None:
        """Record that `output` was processed; publish if no other step is in flight."""
        now_ns = self._clock_ns()
        if output.total_num_scheduled_tokens:
            requests = self._scheduler.requests
            self._deadlines.stepped(
                now_ns, output.num_scheduled_tokens, lambda id_: _has_token(requests.get(id_))
            )
            self._step_ends(
                now_ns, output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
            )
        if self._scheduler.finished_req_ids:
            self._deadlines.finished(self._scheduler.finished_req_ids)
        self._unpublished = self._steps_in_flight > 0
        if not self._unpublished:
            self._publish(now_ns)

    def ended(self) -> None:
        """Remove requests that were finished from outside (aborted), and publish."""
        self._deadlines.finished(self._scheduler.finished_req_ids)
        self.publish()

    def _figures(self) -> tuple[int, int, int, int]:
        running, waiting = self._scheduler.get_request_counts()
        pool = self._scheduler.kv_cache_manager.block_pool
        counted = pool.num_gpu_blocks - 1  # Block 0 is the null block.
        used = counted - pool.get_num_free_blocks()
        lender = self._lender()
        away = 0 if lender is None else lender.blocks_away
        return running, waiting, used, counted + away


class DecodeStatePublisher(HostStatePublisher):
    """Publisher of a host whose prompts other hosts compute: it has TPOT deadlines alone."""

    prefills = False

    def __init__(
        self,
        scheduler: SchedulerSurface,
        seat: HostSeat,
        targets_s: tuple[float, float],
        **more: Any,  # noqa: ANN401 -- as the base has it
    ) -> None:
        """Create the publisher as its base does, without a TTFT target."""
        super().__init__(scheduler, seat, (0.0, targets_s[1]), **more)


def _has_token(request: RequestSurface | None) -> bool:
    # A request that is gone has finished, so it had its first token.
    return request is None or request.num_output_tokens > 0

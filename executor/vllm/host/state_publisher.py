"""Publisher of a vLLM host's state: the scheduler's work as the control page's host section."""

import time
from collections.abc import Callable

from executor.control_page.host_seat import HostSeat
from executor.control_page.seqlock_records import HostState
from executor.deadline_tracker import DeadlineTracker
from executor.step_log import StepLog
from executor.vllm.compat import RequestSurface, SchedulerSurface, StepSurface
from executor.vllm.host.kv_lender import KvLent


class HostStatePublisher:
    """Called by the scheduler at each turn of its life; it writes to the page about once a step.

    An idle host that becomes busy and a busy one that becomes idle are told at once. Between, what
    is new waits for the next moment of the same turn of the engine core's loop: arrivals, and the
    end of a step while another is in flight, for the schedule() that follows; a schedule() that
    tells of nothing new, for the end of its step.

    What a step costs grows with what changed in it, not with how many requests run: see
    `executor.deadline_tracker`, and `make bench-host-overhead`.
    Busy time is what passes while at least one step with work is between schedule() and the end of
    update_from_output(); asynchronous scheduling keeps two of them in flight.
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
        """`lent`: what the host lends of its KV memory now; `blocks_away`: the part of it in blocks
        that vLLM's pool does not count."""
        self._write = seat.write_packed
        # In the order of `_publish`, which packs as it stands: making a HostState first would cost
        # as much again.
        self._pack = HostState.packer(
            "step_seq",
            "in_step",
            "running",
            "waiting",
            "queued_prefill_tokens",
            "earliest_prefill_deadline_ns",
            "earliest_decode_deadline_ns",
            "kv_used",
            "kv_total",
            "busy_ns",
            "last_step_ns",
            "heartbeat_ns",
            *KvLent._fields,
        )
        self._step_log = step_log
        self._lent = lent
        self._blocks_away = blocks_away
        self._clock_ns = clock_ns
        self._wall_s = wall_s
        self._book = DeadlineTracker(round(ttft_s * 1e9), round(tpot_s * 1e9))
        self._steps_in_flight = 0
        self._step_seq = 0
        self._step_began_ns = 0
        self._busy_until_ns = 0
        self._busy_ns = 0
        self._last_step_ns = 0
        self._told_idle = True
        self._untold = False

    def started(self, scheduler: SchedulerSurface) -> None:
        """Publish the idle host: its guest may run before the first request comes."""
        self._publish(scheduler, self._clock_ns())

    def arrived(self, scheduler: SchedulerSurface, request: RequestSurface) -> None:
        """A request was added."""
        now_ns = self._clock_ns()
        # vLLM stamps arrivals with the wall clock; a jump of it must not move a deadline forward.
        age_ns = max(0, round((self._wall_s() - request.arrival_time) * 1e9))
        self._book.arrived(request.request_id, now_ns - age_ns, request.num_prompt_tokens)
        self._untold = True
        if self._told_idle:
            self._publish(scheduler, now_ns)
            # That it came in is told; that it runs from now on is not.
            self._untold = True
        if self._step_log is not None:
            self._step_log.arrival(now_ns - age_ns, now_ns, request.num_prompt_tokens)

    def scheduled(self, scheduler: SchedulerSurface, output: StepSurface, began_ns: int) -> None:
        """schedule() made `output`; it was entered at `began_ns`."""
        if output.total_num_scheduled_tokens == 0:
            if self._untold:
                self._publish(scheduler, self._clock_ns())
            return
        if self._steps_in_flight == 0:
            self._step_began_ns = self._busy_until_ns = began_ns
            if self._step_log is not None:
                self._step_log.begin()
        self._book.begun([new.req_id for new in output.scheduled_new_reqs])
        self._steps_in_flight += 1
        self._step_seq += 1
        if self._untold:
            self._publish(scheduler, self._clock_ns())

    def stepped(self, scheduler: SchedulerSurface, output: StepSurface) -> None:
        """update_from_output() is done with `output`."""
        now_ns = self._clock_ns()
        if output.total_num_scheduled_tokens:
            requests = scheduler.requests
            self._book.stepped(
                now_ns, output.num_scheduled_tokens, lambda id_: _has_token(requests.get(id_))
            )
            self._steps_in_flight = max(0, self._steps_in_flight - 1)
            self._busy_ns += now_ns - self._busy_until_ns
            self._last_step_ns = now_ns - self._step_began_ns
            if self._step_log is not None:
                self._step_log.step(
                    self._step_began_ns,
                    now_ns,
                    output.total_num_scheduled_tokens,
                    len(output.num_scheduled_tokens),
                )
            self._step_began_ns = self._busy_until_ns = now_ns
        if scheduler.finished_req_ids:
            self._book.finished(scheduler.finished_req_ids)
        self._untold = self._steps_in_flight > 0
        if not self._untold:
            self._publish(scheduler, now_ns)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return self._book.queued_prefill_tokens

    def lends(self, scheduler: SchedulerSurface) -> None:
        """What the host lends changed."""
        self._publish(scheduler, self._clock_ns())

    def ended(self, scheduler: SchedulerSurface) -> None:
        """Requests were finished from outside (aborted)."""
        self._book.finished(scheduler.finished_req_ids)
        self._publish(scheduler, self._clock_ns())

    def _publish(self, scheduler: SchedulerSurface, now_ns: int) -> None:
        running, waiting = scheduler.get_request_counts()
        pool = scheduler.kv_cache_manager.block_pool
        counted = pool.num_gpu_blocks - 1  # Block 0 is the null block.
        book = self._book
        self._told_idle = not (self._steps_in_flight or running or waiting)
        self._untold = False
        self._write(
            self._pack(
                self._step_seq,
                self._steps_in_flight > 0,
                running,
                waiting,
                book.queued_prefill_tokens,
                book.earliest_prefill_ns,
                book.earliest_decode_ns,
                counted - pool.get_num_free_blocks(),
                counted + self._blocks_away(),
                self._busy_ns,
                self._last_step_ns,
                now_ns,
                *self._lent(),
            )
        )


def _has_token(request: RequestSurface | None) -> bool:
    # A request that is gone has finished, so it had its first token.
    return request is None or request.num_output_tokens > 0

"""Publisher of an SGLang host's state: its scheduler's work as the page's host section."""

import time
from collections.abc import Callable
from typing import Any, Final

from executor.control_page.host_seat import HostSeat
from executor.host.kv_lender import KvLent
from executor.host.state_publisher import StatePublisher
from executor.sglang.host.batch_deadlines import BatchDeadlines
from executor.step_log import StepLog

RECONCILE_STEPS: Final = 64
"""Most steps in which a request that left the queue in another way is not noticed."""


class BatchPublisher(StatePublisher):
    """Publisher called at each turn of the scheduler's loop; it publishes when a step begins.

    SGLang does not report a request's end. A finished one is seen in its batch; one that leaves in
    another way (aborted in the queue, dropped at its limit) when the books are compared with the
    scheduler's, every RECONCILE_STEPS and after each abort. Until then the host looks busier than
    it is. It is idle only when SGLang itself says so.
    """

    _deadlines: BatchDeadlines

    def __init__(
        self,
        seat: HostSeat,
        ttft_s: float,
        tpot_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        step_log: StepLog | None = None,
        lent: Callable[[], KvLent] = KvLent,
    ) -> None:
        """See StatePublisher."""
        book = BatchDeadlines(round(ttft_s * 1e9), round(tpot_s * 1e9))
        super().__init__(seat, book, clock_ns, step_log, lent)

    @property
    def requests(self) -> int:
        """Unfinished requests by its books."""
        return len(self._deadlines)

    def started(self, scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's scheduler
        """Publish the idle host: its guest may run before the first request comes."""
        self._publish(scheduler, self._clock_ns())

    def arrived(self, scheduler: Any, request: Any, *, again: bool) -> None:  # noqa: ANN401
        """Add a request to the queue; `again`: it ran before and was put back."""
        now_ns, id_ = self._clock_ns(), request.rid
        book = self._deadlines
        if again:
            book.put_back(id_)
        else:
            book.arrived(id_, now_ns, len(request.origin_input_ids))
            if self._step_log is not None:
                self._step_log.arrival(now_ns, now_ns, len(request.origin_input_ids))
        self._untold = True
        if self._told_idle:
            self._publish(scheduler, now_ns)
            # Its arrival is published; that it runs from now on is not.
            self._untold = True

    def began(self, scheduler: Any, batch: Any, began_ns: int) -> None:  # noqa: ANN401
        """Record that a step over `batch` is about to run; its scheduling began at `began_ns`."""
        self._step_begins(began_ns)
        if not batch.forward_mode.is_decode():
            self._deadlines.prefill_begun([request.rid for request in batch.reqs])
        if self._untold:
            self._publish(scheduler, self._clock_ns())

    def stepped(self, scheduler: Any, batch: Any) -> None:  # noqa: ANN401
        """Record that the oldest step in flight was processed."""
        now_ns, book, requests = self._clock_ns(), self._deadlines, batch.reqs
        if batch.forward_mode.is_decode():
            tokens = len(requests)
            book.decoded(now_ns)
        else:
            tokens = self._prefilled(batch, now_ns)
        self._step_ends(now_ns, tokens, len(requests))
        ended = [request.rid for request in requests if request.finished_reason is not None]
        if ended:
            book.finished(ended)
        if self._step_seq % RECONCILE_STEPS == 0:
            self._reconcile(scheduler)
        # The next step follows at once and publishes it, or SGLang says that there is none.
        self._untold = True

    def aborted(self, scheduler: Any) -> None:  # noqa: ANN401
        """Compare the books: requests may have ended from outside."""
        self._reconcile(scheduler)
        self._publish(scheduler, self._clock_ns())

    def idled(self, scheduler: Any) -> None:  # noqa: ANN401
        """Publish a turn of the loop without work."""
        if self._told_idle:
            return
        if scheduler.is_fully_idle():
            self._steps_in_flight = 0
            self._deadlines.finished(self._deadlines.known())
            self._publish(scheduler, self._clock_ns())
        elif self._untold:
            self._publish(scheduler, self._clock_ns())

    def lends(self, scheduler: Any) -> None:  # noqa: ANN401
        """Publish a changed loan."""
        self._publish(scheduler, self._clock_ns())

    def _prefilled(self, batch: Any, now_ns: int) -> int:  # noqa: ANN401 -- SGLang's ScheduleBatch
        """Return the tokens of the step."""
        lengths = batch.extend_lens or [1] * len(batch.reqs)
        scheduled = {
            request.rid: tokens for request, tokens in zip(batch.reqs, lengths, strict=False)
        }
        done = {
            request.rid
            for request in batch.reqs
            if request.output_ids or request.finished_reason is not None
        }
        self._deadlines.prefilled(now_ns, scheduled, done.__contains__)
        if batch.decoding_reqs:
            self._deadlines.decoded(now_ns)  # Mixed into the same step.
        return sum(scheduled.values())

    def _reconcile(self, scheduler: Any) -> None:  # noqa: ANN401
        alive = {request.rid for request in scheduler.collect_inflight_reqs()}
        alive.update(request.rid for request in scheduler.waiting_queue)
        if scheduler.chunked_req is not None:
            alive.add(scheduler.chunked_req.rid)
        alive.update(request.rid for batch, _ in scheduler.result_queue for request in batch.reqs)
        self._deadlines.finished(self._deadlines.known() - alive)

    def _publish(self, scheduler: Any, now_ns: int) -> None:  # noqa: ANN401
        book = self._deadlines
        running = book.running
        waiting = book.waiting + len(scheduler.grammar_manager.grammar_queue)
        if not (running or waiting or self._steps_in_flight or scheduler.is_fully_idle()):
            waiting = 1  # Whatever it is, SGLang has something to do.
        allocator = scheduler.token_to_kv_pool_allocator
        page_tokens = allocator.page_size
        free = allocator.available_size() + scheduler.tree_cache.evictable_size()
        total = allocator.size // page_tokens
        used = max(0, total - free // page_tokens)
        self._tell(now_ns, running, waiting, used, total)

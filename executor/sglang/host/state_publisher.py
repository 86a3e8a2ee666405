"""Publisher of an SGLang host's state: its scheduler's work as the page's host section."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from executor.host.state_publisher import DeadlineTracker, StatePublisher

RECONCILE_STEPS: Final = 64
"""Most steps for which a request that left the queue in another way is still counted."""


class BatchDeadlines(DeadlineTracker):
    """Deadlines of an engine that decodes all of its sequences in a step, or none of them.

    A step of SGLang is a prefill or a decode. While prompts are prefilled all others wait, and the
    next decode serves every one of them. So only sequences that were put back into the queue need a
    time of their own; the longest wait among the others is that since the last decode. Call it with
    each step by its kind, never `begun` or `stepped`.
    """

    @property
    def waiting(self) -> int:
        """Number of requests without a begun step, and of those put back into the queue."""
        return len(self._prefill_left) - len(self._prefilling) + len(self._left_out)

    @property
    def running(self) -> int:
        """Number of requests that are in steps."""
        return len(self._prefilling) + len(self._decoding) - len(self._left_out)

    def known(self) -> set[str]:
        """Return the ids of all unfinished requests."""
        return {*self._prefill_left, *self._decoding}

    def prefill_begun(self, request_ids: list[str]) -> None:
        """Record that a prefill of these requests begins."""
        self._prefilling.update(id_ for id_ in request_ids if id_ in self._prefill_left)
        for request_id in request_ids:
            self._left_out.pop(request_id, None)

    def prefilled(
        self, now_ns: int, scheduled: Mapping[str, int], has_token: Callable[[str], bool]
    ) -> None:
        """Record that a prefill ended.

        scheduled: tokens of each request in it. has_token: returns True for a request that has its
        first token.
        """
        alone = not self._decoding
        self._prefilled(
            [id_ for id_ in scheduled if id_ in self._prefill_left], scheduled, has_token
        )
        if alone:
            self._last_token_ns = now_ns

    def decoded(self, now_ns: int) -> None:
        """Record that a decode ended, with a token for each running request."""
        self._last_token_ns = now_ns

    def put_back(self, request_id: str) -> None:
        """Record that a running request waits again, its tokens so far kept."""
        if request_id in self._decoding:
            self._left_out.setdefault(request_id, self._last_token_ns)
        else:
            self._prefilling.discard(request_id)


class BatchPublisher(StatePublisher):
    """Publisher of an SGLang host, called at each turn of the scheduler's loop.

    It publishes when a step begins. SGLang does not report a request's end. A finished one is seen
    in its batch; one that leaves in another way (aborted in the queue, dropped at its limit) when
    the books are compared with the scheduler's, every RECONCILE_STEPS and after each abort. Until
    then the host looks busier than it is. It is idle only when SGLang itself says so.
    """

    tracker = BatchDeadlines
    _deadlines: BatchDeadlines

    @property
    def requests(self) -> int:
        """Number of unfinished requests by the publisher's books."""
        return len(self._deadlines)

    def arrived(self, request: Any, *, again: bool) -> None:  # noqa: ANN401 -- SGLang's request
        """Record a request in the queue; `again`: it ran before and was put back."""
        now_ns, prompt_tokens = self._clock_ns(), len(request.origin_input_ids)
        if again:
            self._deadlines.put_back(request.rid)
        else:
            self._deadlines.arrived(request.rid, now_ns, prompt_tokens)
        self._arrives(now_ns, now_ns, None if again else prompt_tokens)

    def began(self, batch: Any, began_ns: int) -> None:  # noqa: ANN401
        """Record that a step over `batch` is about to run; its scheduling began at `began_ns`."""
        self._step_begins(began_ns)
        if not batch.forward_mode.is_decode():
            self._deadlines.prefill_begun([request.rid for request in batch.reqs])
        self._publish_begun()

    def stepped(self, batch: Any) -> None:  # noqa: ANN401
        """Record that the oldest step in flight was processed; the next step publishes it."""
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
            self._reconcile()
        # The next step follows at once and publishes it, or SGLang says that there is none.
        self._unpublished = True

    def aborted(self) -> None:
        """Remove requests that the scheduler no longer has, and publish the rest."""
        self._reconcile()
        self.publish()

    def idled(self) -> None:
        """Publish a turn of the loop without work, unless idleness is published already."""
        if self._published_idle:
            return
        if self._scheduler.is_fully_idle():
            self._steps_in_flight = 0
            self._deadlines.finished(self._deadlines.known())
            self.publish()
        elif self._unpublished:
            self.publish()

    def _prefilled(self, batch: Any, now_ns: int) -> int:  # noqa: ANN401 -- SGLang's ScheduleBatch
        """Record the end of a prefill; return its number of tokens."""
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

    def _reconcile(self) -> None:
        alive = {request.rid for request in self._scheduler.collect_inflight_reqs()}
        alive.update(request.rid for request in self._scheduler.waiting_queue)
        if self._scheduler.chunked_req is not None:
            alive.add(self._scheduler.chunked_req.rid)
        alive.update(
            request.rid for batch, _ in self._scheduler.result_queue for request in batch.reqs
        )
        self._deadlines.finished(self._deadlines.known() - alive)

    def _figures(self) -> tuple[int, int, int, int]:
        book = self._deadlines
        running = book.running
        waiting = book.waiting + len(self._scheduler.grammar_manager.grammar_queue)
        if not (running or waiting or self._steps_in_flight or self._scheduler.is_fully_idle()):
            waiting = 1  # Whatever it is, SGLang has something to do.
        allocator = self._scheduler.token_to_kv_pool_allocator
        page_tokens = allocator.page_size
        free = allocator.available_size() + self._scheduler.tree_cache.evictable_size()
        total = allocator.size // page_tokens
        lender = self._lender()
        away = 0 if lender is None else lender.blocks_away
        used = max(0, total - away - free // page_tokens)
        return running, waiting, used, total

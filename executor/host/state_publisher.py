"""Publisher of a host's state: work and deadlines of an engine, in the page's host section."""

import heapq
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

from executor.control_page.host_seat import HostSeat
from executor.control_page.seqlock_records import NO_DEADLINE, HostState
from executor.host.kv_lender import HostLender, KvLent
from executor.step_log import StepLog

# `_publish` packs the fields itself: a HostState would cost as much again.
_PACK: Final = HostState.packer(
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
_NOTHING_LENT: Final = KvLent()


class DeadlineTracker:
    """Earliest TTFT and TPOT deadlines of a host's requests, updated in little time.

    Targets are in ns; a target of 0 means that none is known. All requests share one TTFT target,
    so the earliest prefill deadline belongs to the oldest arrival that still waits for its first
    token. Requests come nearly in the order of their arrival times: a queue holds the ones in
    order, a heap the others, and both drop entries lazily. Nearly all decoding requests get a token
    in every step, so only the ones left out need a time of their own.

    Nor does a step look at its decoding requests one by one. Every request of a step is known to be
    prefilling, decoding or gone, and the first and the last are few: the rest are the decoding
    ones, and while their count is right no request was left out. Only a wrong count makes a step
    search.
    """

    def __init__(self, ttft_ns: int, tpot_ns: int) -> None:
        self._ttft_ns = ttft_ns
        self._tpot_ns = tpot_ns
        self._arrivals: deque[tuple[int, str]] = deque()
        self._overtaken: list[tuple[int, str]] = []
        self._prefill_left: dict[str, int] = {}
        # The prefilling requests that have been in a step.
        self._prefilling: set[str] = set()
        self._decoding: set[str] = set()
        # Ordered by the time at which they were left out, so the first has waited longest.
        self._left_out: dict[str, int] = {}
        # Requests that ended while steps were in flight that may hold them: (last of those steps,
        # request).
        self._gone: deque[tuple[int, str]] = deque()
        self._last_token_ns = 0
        self._begun = 0
        self._done = 0
        self.queued_prefill_tokens = 0

    def __len__(self) -> int:
        return len(self._prefill_left) + len(self._decoding)

    def arrived(self, request_id: str, arrival_ns: int, prompt_tokens: int) -> None:
        """Add a request; one that is known already (a streamed session) keeps its deadline."""
        if request_id in self._prefill_left or request_id in self._decoding:
            return
        if not self._arrivals or arrival_ns >= self._arrivals[-1][0]:
            self._arrivals.append((arrival_ns, request_id))
        else:
            heapq.heappush(self._overtaken, (arrival_ns, request_id))
        self._prefill_left[request_id] = prompt_tokens
        self.queued_prefill_tokens += prompt_tokens

    def begun(self, new_ids: Iterable[str]) -> None:
        """Record that a step was scheduled; `new_ids`: requests in a step for the first time.

        Call it once for each `stepped`: steps end in the order in which they begin.
        """
        self._begun += 1
        for request_id in new_ids:
            if request_id in self._prefill_left:
                self._prefilling.add(request_id)

    def stepped(
        self, now_ns: int, scheduled: Mapping[str, int], has_token: Callable[[str], bool]
    ) -> None:
        """Record that a step ended.

        scheduled: tokens of each request in it. has_token: returns True for a request that has its
        first token.
        """
        prefilled: list[str] = []
        decoded = len(scheduled)
        if self._prefilling:
            prefilled = [id_ for id_ in self._prefilling if id_ in scheduled]
            decoded -= len(prefilled)
        if self._gone:
            decoded -= self._gone_of(scheduled)
        if self._left_out:
            for request_id in [id_ for id_ in self._left_out if id_ in scheduled]:
                del self._left_out[request_id]
        if decoded != len(self._decoding) - len(self._left_out):
            prefilled = self._search(scheduled)
        if prefilled:
            self._prefilled(prefilled, scheduled, has_token)
        self._last_token_ns = now_ns
        self._done += 1

    def finished(self, request_ids: Iterable[str]) -> None:
        """Remove ended requests, whose deadlines no longer count."""
        for request_id in request_ids:
            if request_id in self._decoding:
                self._decoding.discard(request_id)
                self._left_out.pop(request_id, None)
            elif request_id in self._prefill_left:
                self._prefilling.discard(request_id)
                self.queued_prefill_tokens -= self._prefill_left.pop(request_id)
            else:
                continue
            if self._begun > self._done:
                self._gone.append((self._begun, request_id))

    @property
    def earliest_prefill_ns(self) -> int:
        """Time at which the next first token is due, NO_DEADLINE if no request waits for one."""
        queue, heap, waiting = self._arrivals, self._overtaken, self._prefill_left
        while queue and queue[0][1] not in waiting:
            queue.popleft()
        while heap and heap[0][1] not in waiting:
            heapq.heappop(heap)
        if not (self._ttft_ns and waiting):
            return NO_DEADLINE
        oldest_ns = min(first[0][0] for first in (queue, heap) if first) if heap else queue[0][0]
        return oldest_ns + self._ttft_ns

    @property
    def earliest_decode_ns(self) -> int:
        """Time at which the next later token is due, NO_DEADLINE if no request waits for one."""
        if not (self._decoding and self._tpot_ns):
            return NO_DEADLINE
        last_ns = next(iter(self._left_out.values())) if self._left_out else self._last_token_ns
        return last_ns + self._tpot_ns

    def _gone_of(self, scheduled: Mapping[str, int]) -> int:
        """Return how many of a step's requests ended while the step was in flight."""
        while self._gone and self._gone[0][0] <= self._done:
            self._gone.popleft()
        return sum([id_ in scheduled for _, id_ in self._gone])

    def _search(self, scheduled: Mapping[str, int]) -> list[str]:
        """Record the decoding requests that a step left out; return its prefilling ones."""
        for request_id in self._decoding.difference(scheduled):
            self._left_out.setdefault(request_id, self._last_token_ns)
        return [id_ for id_ in scheduled if id_ in self._prefill_left]

    def _prefilled(
        self,
        request_ids: Iterable[str],
        scheduled: Mapping[str, int],
        has_token: Callable[[str], bool],
    ) -> None:
        for request_id in request_ids:
            left = self._prefill_left[request_id]
            if has_token(request_id):
                del self._prefill_left[request_id]
                self._prefilling.discard(request_id)
                self._decoding.add(request_id)
                self.queued_prefill_tokens -= left
            else:
                self._prefilling.add(request_id)
                done = min(left, scheduled[request_id])
                self._prefill_left[request_id] = left - done
                self.queued_prefill_tokens -= done


class StatePublisher(ABC):
    """Base of the engines' publishers: writes the host section of the page about once a step.

    The changes of an idle host to busy and of a busy one to idle are published at once. Others wait
    for the next moment of the same turn of the engine's loop: arrivals, and the end of a step while
    another is in flight, for the step that follows.

    The cost of a step grows with its changes, not with the number of running requests: see
    `DeadlineTracker`, and `make bench-host-overhead`. Busy time is the time in which at least one
    step with work is in flight; asynchronous scheduling keeps two of them there.
    """

    tracker: ClassVar[type[DeadlineTracker]] = DeadlineTracker

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 -- the engine's
        seat: HostSeat,
        targets_s: tuple[float, float],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        step_log: StepLog | None = None,
        lender: Callable[[], HostLender | None] = lambda: None,
    ) -> None:
        """Create the publisher, without publishing yet.

        targets_s: TTFT and TPOT in seconds, 0 for unknown. lender: returns the lender of KV memory,
        or None.
        """
        self._scheduler = scheduler
        self._write = seat.write_packed
        self._step_log = step_log
        self._lender = lender
        self._clock_ns = clock_ns
        ttft_s, tpot_s = targets_s
        self._deadlines = self.tracker(round(ttft_s * 1e9), round(tpot_s * 1e9))
        self._steps_in_flight = 0
        self._step_seq = 0
        self._step_began_ns = 0
        self._busy_until_ns = 0
        self._busy_ns = 0
        self._last_step_ns = 0
        self._published_idle = True
        self._unpublished = False
        self._lent = _NOTHING_LENT

    @property
    def queued_prefill_tokens(self) -> int:
        """Number of prompt tokens still to compute, of requests without a first token."""
        return self._deadlines.queued_prefill_tokens

    def publish(self) -> None:
        """Publish the engine's present state in the host section."""
        self._publish(self._clock_ns())

    def publish_loan(self) -> None:
        """Publish the loan at once if it changed; other changes wait as long as without it."""
        loan = self._loan
        if loan != self._lent:
            unpublished = self._unpublished
            self._publish(self._clock_ns(), loan)
            self._unpublished = unpublished

    @property
    def _loan(self) -> KvLent:
        lender = self._lender()
        return _NOTHING_LENT if lender is None else lender.lent

    def _publish_begun(self) -> None:
        """Publish if the page lacks what the step that begins is to publish, or lends too much.

        More to lend waits for the next time.
        """
        loan, published = self._loan, self._lent
        lends_less = loan.bytes_lent < published.bytes_lent
        if self._unpublished or lends_less or loan.reserve_missing > published.reserve_missing:
            self._publish(self._clock_ns(), loan)

    def _step_begins(self, began_ns: int) -> None:
        """Record a scheduled step with work; its scheduling began at `began_ns`."""
        if self._steps_in_flight == 0:
            self._step_began_ns = self._busy_until_ns = began_ns
            if self._step_log is not None:
                self._step_log.begin()
        self._steps_in_flight += 1
        self._step_seq += 1

    def _step_ends(self, now_ns: int, tokens: int, sequences: int) -> None:
        """Record that the oldest step in flight was processed, with its tokens and sequences."""
        self._steps_in_flight = max(0, self._steps_in_flight - 1)
        self._busy_ns += now_ns - self._busy_until_ns
        self._last_step_ns = now_ns - self._step_began_ns
        if self._step_log is not None:
            self._step_log.step(self._step_began_ns, now_ns, tokens, sequences)
        self._step_began_ns = self._busy_until_ns = now_ns

    def _arrives(self, now_ns: int, arrived_ns: int, prompt_tokens: int | None) -> None:
        """Record an arrival; publish at once if the host was idle.

        prompt_tokens: None for a request that was put back, which the step log does not count.
        """
        self._unpublished = True
        if self._published_idle:
            self._publish(now_ns)
            # Its arrival is published; that it runs from now on is not.
            self._unpublished = True
        if self._step_log is not None and prompt_tokens is not None:
            self._step_log.arrival(arrived_ns, now_ns, prompt_tokens)

    @abstractmethod
    def _figures(self) -> tuple[int, int, int, int]:
        """Return four numbers: running and waiting requests, used KV blocks, all KV blocks."""

    def _publish(self, now_ns: int, loan: KvLent | None = None) -> None:
        running, waiting, kv_used, kv_total = self._figures()
        deadlines, self._lent = self._deadlines, loan or self._loan
        self._published_idle = not (self._steps_in_flight or running or waiting)
        self._unpublished = False
        self._write(
            _PACK(
                self._step_seq,
                self._steps_in_flight > 0,
                running,
                waiting,
                deadlines.queued_prefill_tokens,
                deadlines.earliest_prefill_ns,
                deadlines.earliest_decode_ns,
                kv_used,
                kv_total,
                self._busy_ns,
                self._last_step_ns,
                now_ns,
                *self._lent,
            )
        )

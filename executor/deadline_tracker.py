"""Earliest TTFT and TPOT deadlines of a host's requests, updated in little time.

All requests share one TTFT target, so the earliest prefill deadline belongs to the oldest arrival
that still waits for its first token. Requests come nearly in the order of their arrival times: a
queue holds the ones in order, a heap the others, and both drop entries lazily. Nearly all decoding
requests get a token in every step, so only the ones left out need a time of their own.

Nor does a step look at its decoding requests one by one. Every request of a step is known to be
prefilling, decoding or gone, and the first and the last are few: the rest are the decoding ones,
and while their count is right no request was left out. Only a wrong count makes a step search.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from executor.control_page.seqlock_records import NO_DEADLINE


class DeadlineTracker:
    """Deadlines for targets in ns; a target of 0 means that none is known."""

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
        """Record a scheduled step; `new_ids` are all requests that are in one for the first time.

        Call it once for each `stepped`: steps end in the order in which they begin.
        """
        self._begun += 1
        for request_id in new_ids:
            if request_id in self._prefill_left:
                self._prefilling.add(request_id)

    def stepped(
        self, now_ns: int, scheduled: Mapping[str, int], has_token: Callable[[str], bool]
    ) -> None:
        """Record a step's end over `scheduled` (request → tokens); `has_token`: not prefilling."""
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
        """Remove ended requests."""
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
        """Return how many of a step's requests ended while it was in flight."""
        while self._gone and self._gone[0][0] <= self._done:
            self._gone.popleft()
        return sum([id_ in scheduled for _, id_ in self._gone])

    def _search(self, scheduled: Mapping[str, int]) -> list[str]:
        """Record the requests left out; return the scheduled requests without a first token."""
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

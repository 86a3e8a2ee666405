"""Earliest TTFT and TPOT deadlines of a host's requests, kept up to date in little time.

All requests share one TTFT target, so the earliest prefill deadline belongs to the oldest arrival
that still waits for its first token (a heap with lazy deletion). Nearly all decoding requests get a
token in every step, so only those that were left out need a time of their own.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping

from slo import NO_DEADLINE, decode_deadline_ns, prefill_deadline_ns


class DeadlineBook:
    """Deadlines for targets in ns; a target of 0 means that none is known."""

    def __init__(self, ttft_ns: int, tpot_ns: int) -> None:
        self._ttft_ns = ttft_ns
        self._tpot_ns = tpot_ns
        self._arrivals: list[tuple[int, str]] = []
        self._prefill_left: dict[str, int] = {}
        self._decoding: set[str] = set()
        self._left_out: dict[str, int] = {}
        self._last_token_ns = 0
        self.queued_prefill_tokens = 0

    def __len__(self) -> int:
        return len(self._prefill_left) + len(self._decoding)

    def arrived(self, request_id: str, arrival_ns: int, prompt_tokens: int) -> None:
        """A request came in; one that is known already (a streamed session) keeps its deadline."""
        if request_id in self._prefill_left or request_id in self._decoding:
            return
        heapq.heappush(self._arrivals, (arrival_ns, request_id))
        self._prefill_left[request_id] = prompt_tokens
        self.queued_prefill_tokens += prompt_tokens

    def stepped(
        self, now_ns: int, scheduled: Mapping[str, int], has_token: Callable[[str], bool]
    ) -> None:
        """A step over `scheduled` (request → tokens) ended; `has_token`: first token delivered?"""
        if self._left_out:
            self._left_out = {
                id_: at_ns for id_, at_ns in self._left_out.items() if id_ not in scheduled
            }
        for request_id in self._decoding.difference(scheduled):
            self._left_out.setdefault(request_id, self._last_token_ns)
        if self._prefill_left:
            self._prefilled(scheduled, has_token)
        self._last_token_ns = now_ns

    def finished(self, request_ids: Iterable[str]) -> None:
        """Requests ended, for whatever reason."""
        for request_id in request_ids:
            self._decoding.discard(request_id)
            self._left_out.pop(request_id, None)
            self.queued_prefill_tokens -= self._prefill_left.pop(request_id, 0)

    @property
    def earliest_prefill_ns(self) -> int:
        """When the next first token is due, NO_DEADLINE when none is waited for."""
        while self._arrivals and self._arrivals[0][1] not in self._prefill_left:
            heapq.heappop(self._arrivals)
        if not (self._arrivals and self._ttft_ns):
            return NO_DEADLINE
        return prefill_deadline_ns(self._arrivals[0][0], self._ttft_ns)

    @property
    def earliest_decode_ns(self) -> int:
        """When the next token after a first one is due, NO_DEADLINE when none is waited for."""
        if not (self._decoding and self._tpot_ns):
            return NO_DEADLINE
        last_ns = min(self._left_out.values()) if self._left_out else self._last_token_ns
        return decode_deadline_ns(last_ns, self._tpot_ns)

    def _prefilled(self, scheduled: Mapping[str, int], has_token: Callable[[str], bool]) -> None:
        for request_id in self._prefill_left.keys() & scheduled.keys():
            left = self._prefill_left[request_id]
            if has_token(request_id):
                del self._prefill_left[request_id]
                self._decoding.add(request_id)
                self.queued_prefill_tokens -= left
            else:
                done = min(left, scheduled[request_id])
                self._prefill_left[request_id] = left - done
                self.queued_prefill_tokens -= done

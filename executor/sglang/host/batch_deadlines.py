"""Deadlines of an engine that decodes all of its sequences in a step, or none of them.

A step of SGLang is a prefill or a decode. While prompts are prefilled all others wait, and the next
decode serves every one of them. So only sequences that were put back into the queue need a time of
their own; the longest wait among the others is that since the last decode.
"""

from collections.abc import Callable, Mapping

from executor.deadline_tracker import DeadlineTracker


class BatchDeadlines(DeadlineTracker):
    """Deadlines fed with each step by its kind; `begun` and `stepped` are not for it."""

    @property
    def waiting(self) -> int:
        """Requests without a first token of which no step has begun, and those put back."""
        return len(self._prefill_left) - len(self._prefilling) + len(self._left_out)

    @property
    def running(self) -> int:
        """Requests that are in steps."""
        return len(self._prefilling) + len(self._decoding) - len(self._left_out)

    def known(self) -> set[str]:
        """Return the ids of all unfinished requests."""
        return {*self._prefill_left, *self._decoding}

    def prefill_begun(self, request_ids: list[str]) -> None:
        """Record that a prefill of these begins."""
        self._prefilling.update(id_ for id_ in request_ids if id_ in self._prefill_left)
        for request_id in request_ids:
            self._left_out.pop(request_id, None)

    def prefilled(
        self, now_ns: int, scheduled: Mapping[str, int], has_token: Callable[[str], bool]
    ) -> None:
        """Record a prefill's end over `scheduled` (request → tokens); `has_token`: first token."""
        alone = not self._decoding
        self._prefilled(
            [id_ for id_ in scheduled if id_ in self._prefill_left], scheduled, has_token
        )
        if alone:
            self._last_token_ns = now_ns

    def decoded(self, now_ns: int) -> None:
        """Record the end of a decode, with a token for each running request."""
        self._last_token_ns = now_ns

    def put_back(self, request_id: str) -> None:
        """Record that a running request waits again, its tokens so far kept."""
        if request_id in self._decoding:
            self._left_out.setdefault(request_id, self._last_token_ns)
        else:
            self._prefilling.discard(request_id)

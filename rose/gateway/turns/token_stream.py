"""Token stream: the readers' view of one turn's journal, and its waiting readers.

tell* ── end      over: the journal's `finish_reason` says how
      └─ fail     over: `error` says why

It is kept for repeated requests after the turn is over.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_scheduler import Segment, TurnJournal, VersionSpan
from rose.contract.replica import PromptLogprobs, RoutedExperts, top_row_bytes
from rose.gateway.errors import TurnError, fresh
from rose.gateway.text_codec import TextTrack

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Measured sizes of CPython's objects: of a stream with its parts, of a span or segment, of a prompt
# position.
FEED_BYTES = 2_048
SPAN_BYTES = 160
PLACE_BYTES = 150
ID_BYTES = 8
# Name of the journal's column of the most likely tokens at each token.
TOP_LOGPROBS = "top_logprobs"
# Name of the column of the experts of each position but the last.
ROUTED_EXPERTS = "routed_experts"


@dataclass(slots=True, eq=False)
class TokenStream:
    """Output of one turn as its readers see it: one writer, any number of readers, each of which
    remembers how many tokens it has seen.
    """

    journal: TurnJournal
    text: TextTrack | None = None
    # Unix time of the turn's begin, equal in all its answers, however often it is requested.
    created: int = field(default_factory=lambda: int(time.time()))
    took_s: float = 0.0
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    # Shape of `routed_experts`, without data; None before they came, or if nobody asked.
    routes: RoutedExperts | None = None
    # The prompt with the tokens of its images; None before it came, or if it was sent so.
    expanded: list[int] | None = None
    _began_s: float = field(default_factory=time.monotonic)
    _error: TurnError | None = None
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)
    _ended: list[asyncio.Future[None]] = field(default_factory=list)
    _listeners: list[Callable[[], None]] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Number of the prompt's tokens."""
        return self.journal.prompt_tokens

    @property
    def tokens(self) -> "array[int]":
        """Ids of the output tokens so far."""
        return self.journal.tokens

    @property
    def logprobs(self) -> "array[float]":
        """Logprobs of the output tokens so far, one for each token."""
        return self.journal.logprobs

    @property
    def versions(self) -> list[VersionSpan]:
        """Spans of output tokens by the policy version that sampled them; tokens of unknown version
        are left out.
        """
        return [span for span in self.journal.versions if span.version >= 0]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Spans of output tokens by the replica that sampled them."""
        return self.journal.segments

    @property
    def attempts(self) -> int:
        """Number of attempts that the turn has begun."""
        return self.journal.attempts

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of a whole turn ("stop" or "length"), None before that or if it failed."""
        return self.journal.finish_reason

    @property
    def over(self) -> bool:
        """True if the turn is whole or has failed, so that no more tokens come."""
        return self.finish_reason is not None or self._error is not None

    @property
    def error(self) -> TurnError | None:
        """Fresh copy of the error that ended the turn without an answer, to be raised; None without
        one.
        """
        return None if self._error is None else fresh(self._error)

    @property
    def size_bytes(self) -> int:
        """Estimate of the memory that the kept turn takes, in bytes."""
        journal = self.journal
        held = FEED_BYTES + journal.tokens.itemsize * len(journal.tokens)
        held += journal.logprobs.itemsize * len(journal.logprobs)
        held += self.column_bytes + ID_BYTES * len(self.expanded or ())
        held += SPAN_BYTES * (len(journal.versions) + len(journal.segments))
        for place in self.prompt_logprobs or ():
            held += PLACE_BYTES * (1 + len(place or ()))
        return held if self.text is None else held + self.text.size_bytes

    @property
    def column_bytes(self) -> int:
        """Bytes of the data that came with the tokens because the turn asked for it."""
        return sum(map(len, self.journal.columns.values()))

    def tell(self) -> None:
        """Wake the readers that wait for tokens, and those that wait for the end if the turn is
        over, and call all listeners.
        """
        waiters, self._waiters = self._waiters, []
        if self._ended and self.over:
            waiters += self._ended
            self._ended = []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        for listener in tuple(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` now and on each later `tell`; it must not wait or raise."""
        self._listeners.append(listener)
        listener()

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Stop calling this listener."""
        self._listeners.remove(listener)

    def show(self, journal: TurnJournal, text: TextTrack | None) -> None:
        """Replace journal and text by those of another copy, which has all tokens that readers have
        seen.
        """
        self.journal, self.text = journal, text

    def end(self, stop_reason: int | str | None) -> None:
        """Record stop reason and duration of the turn, whole in the journal; wake readers."""
        self.took_s = time.monotonic() - self._began_s
        self.stop_reason = stop_reason
        self.tell()

    def fail(self, error: TurnError) -> None:
        """End the turn with this error unless it is over, and wake its readers; its tokens so far
        stay readable.
        """
        if not self.over:
            self._error = fresh(error)
            self.tell()

    async def beyond(self, seen: int) -> None:
        """Wait until there are more than `seen` tokens or the turn is over."""
        while len(self.journal.tokens) <= seen and not self.over:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def ended(self) -> asyncio.Future[None]:
        """Return a new future that is done when the turn is over; call it only before that."""
        ended = asyncio.get_running_loop().create_future()
        self._ended.append(ended)
        return ended

    async def finished(self) -> None:
        """Wait until the turn is over. Raises its TurnError if it failed."""
        if not self.over:
            await self.ended()
        if self._error is not None:
            raise fresh(self._error)

    def top_logprobs(self, start: int, end: int, most: int) -> bytes:
        """Return the `most` most likely tokens at each of the tokens [start, end), as
        `StreamLine.top_logprobs` has them.
        """
        row = top_row_bytes(most)
        found = self.journal.columns.get(TOP_LOGPROBS, b"")
        return bytes(memoryview(found)[start * row : end * row])

    def routed_experts(self) -> "NDArray[Any] | None":
        """Return the experts of all positions but the last as an array of shape (positions, layers,
        choices), None if they were not asked for.
        """
        if self.routes is None:
            return None
        import numpy as np

        data = bytes(self.journal.columns.get(ROUTED_EXPERTS, b""))
        found = np.frombuffer(data, f"<u{self.routes.width}")
        return found.reshape(-1, self.routes.layers, self.routes.choices)

    def spans(self, start: int, end: int) -> list[VersionSpan]:
        """Return the version spans of the tokens [start, end), cut to that range; tokens of unknown
        version are left out.
        """
        return [
            VersionSpan(s.version, max(start, s.start), min(end, s.end), s.oldest_version)
            for s in self.journal.versions
            if s.start < end and s.end > start and s.version >= 0
        ]


async def all_finished(feeds: Sequence[TokenStream]) -> None:
    """Wait until all turns are over. Raises the first TurnError as soon as one fails."""
    if len(feeds) == 1:
        return await feeds[0].finished()
    news = asyncio.get_running_loop().create_future()
    running = [feed for feed in feeds if not feed.over]
    left = iter(range(len(running) - 1, -1, -1))

    def ended(feed: TokenStream, _: asyncio.Future[None]) -> None:
        last = next(left) == 0
        if not news.done() and (last or feed.error is not None):
            news.set_result(None)

    if running and all(feed.error is None for feed in feeds):
        for feed in running:
            feed.ended().add_done_callback(partial(ended, feed))
        await news
    for feed in feeds:
        if feed.error is not None:
            raise feed.error
    return None

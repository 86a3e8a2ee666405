"""The tokens of one turn as its readers follow them.

add* ── deliver   over: `finish_reason` says how
     └─ fail      over: `error` says why

It is kept for repeated requests after the turn is over, so it holds arrays, not lists of objects.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from elastic_scheduler import Deliver, Segment, VersionSpan, stamp
from rose.gateway.errors import TurnError, fresh
from rose.gateway.text_codec import TextTrack

# Of CPython's objects, measured: a feed and what shares it, a span or a segment.
FEED_BYTES = 2_048
SPAN_BYTES = 160


class TokenStream:
    """One writer, any number of readers; a reader remembers how many tokens it has seen."""

    __slots__ = (
        "_began_s",
        "_ended",
        "_error",
        "_listeners",
        "_waiters",
        "attempts",
        "created",
        "finish_reason",
        "logprobs",
        "prompt_tokens",
        "segments",
        "stop_reason",
        "text",
        "tokens",
        "took_s",
        "versions",
    )

    def __init__(self, prompt_tokens: int, text: TextTrack | None = None) -> None:
        # Every answer of this turn says the same, however often it is asked for.
        self.created = int(time.time())
        self._began_s = time.monotonic()
        self.took_s = 0.0
        self.prompt_tokens = prompt_tokens
        self.text = text
        self.tokens = array("q")
        self.logprobs = array("d")
        self.versions: list[VersionSpan] = []
        self.segments: tuple[Segment, ...] = ()
        self.attempts = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._error: TurnError | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._ended: list[asyncio.Future[None]] = []
        self._listeners: list[Callable[[], None]] = []

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self._error is not None

    @property
    def error(self) -> TurnError | None:
        """Why the turn ended without an answer; to be raised, each time a new one."""
        return None if self._error is None else fresh(self._error)

    @property
    def size_bytes(self) -> int:
        """What is kept of the turn, about: its tokens, their stamps and text."""
        held = FEED_BYTES + self.tokens.itemsize * len(self.tokens)
        held += self.logprobs.itemsize * len(self.logprobs)
        held += SPAN_BYTES * (len(self.versions) + len(self.segments))
        return held if self.text is None else held + self.text.size_bytes

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        oldest_version: int | None = None,
    ) -> None:
        """Tokens of one policy version; a negative version means that nobody knows it.

        `oldest_version` as in `VersionSpan`.
        """
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        self.logprobs.extend(logprobs)
        if version >= 0:
            stamp(self.versions, version, start, len(self.tokens), oldest_version)
        self._wake()

    def tell(self) -> None:
        """What was added may go on: called when no more comes in this step of the event loop."""
        for listener in tuple(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, which must not wait or raise, when there is news, and now."""
        self._listeners.append(listener)
        listener()

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Call it no more."""
        self._listeners.remove(listener)

    def deliver(self, turn: Deliver, stop_reason: int | str | None) -> None:
        """The turn is complete: all its tokens were added."""
        assert len(turn.token_ids) == len(self.tokens), "the feed and the journal differ"
        self.took_s = time.monotonic() - self._began_s
        self.finish_reason = turn.finish_reason
        self.stop_reason = stop_reason
        self.segments = turn.segments
        self.attempts = turn.attempts
        self._wake()

    def adopt(self, other: "TokenStream") -> None:
        """Become as far as another feed of the same turn is; nobody read other tokens here."""
        self.tokens = other.tokens[:]
        self.logprobs = other.logprobs[:]
        self.versions = [*other.versions]
        self.segments, self.attempts = other.segments, other.attempts
        self.text = other.text
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        self.took_s = time.monotonic() - self._began_s
        self._wake()

    def fail(self, error: TurnError) -> None:
        """The turn ends without an answer; what came so far stays readable."""
        if not self.over:
            self._error = fresh(error)
            self._wake()

    async def beyond(self, seen: int) -> None:
        """Return when there are more than `seen` tokens, or the turn is over."""
        while len(self.tokens) <= seen and not self.over:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def ended(self) -> asyncio.Future[None]:
        """Done when the turn, which is not over yet, is."""
        ended = asyncio.get_running_loop().create_future()
        self._ended.append(ended)
        return ended

    async def finished(self) -> None:
        """Return when the turn is over. Raises its TurnError if it failed."""
        if not self.over:
            await self.ended()
        if self._error is not None:
            raise fresh(self._error)

    def spans(self, start: int, end: int) -> list[VersionSpan]:
        """Known versions of tokens [start, end), cut to that range."""
        return [
            VersionSpan(s.version, max(start, s.start), min(end, s.end), s.oldest_version)
            for s in self.versions
            if s.start < end and s.end > start
        ]

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        if self.over:
            waiters += self._ended
            self._ended = []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self.over:
            self.tell()


async def all_finished(feeds: Sequence[TokenStream]) -> None:
    """Return when all turns are over. Raises the first TurnError at once."""
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

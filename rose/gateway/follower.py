"""One turn's tokens on their way to one reader, as events.

step by step ── the reader keeps up ──► pushed: written in the step in which the tokens came
     ▲                                     │ the reader is behind, or the turn is over
     └─────────────────────────────────────┘
"""

import asyncio
from collections.abc import Sequence

from rose.gateway.ask import Ask
from rose.gateway.errors import fresh
from rose.gateway.event_writer import EventWriter
from rose.gateway.feed import TurnFeed

# Bounds what one event holds, and so what a slow reader can make the gateway encode at once.
MAX_EVENT_TOKENS = 512


class Follower:
    """Follows turn `index` of a request to its end."""

    def __init__(self, writer: EventWriter, ask: Ask, index: int, feed: TurnFeed) -> None:
        self._writer = writer
        self._ask = ask
        self._index = index
        self._feed = feed
        self._at = ask.resume_from
        self._stopped: asyncio.Future[Exception | None] | None = None

    async def run(self) -> None:
        """Write all events. Raises the turn's TurnError at its place, or ConnectionError."""
        feed = self._feed
        while True:
            await feed.beyond(self._at)
            end = min(len(feed.tokens), self._at + MAX_EVENT_TOKENS)
            if feed.error is None or end > self._at:
                await self._writer.write(self._event(end))
            self._at = end
            if len(feed.tokens) > end:
                continue
            if feed.over:
                if feed.error is not None:
                    raise feed.error
                return
            await self._pushed()

    async def _pushed(self) -> None:
        """Let tokens be written as they come, until that cannot go on."""
        self._stopped = asyncio.get_running_loop().create_future()
        self._feed.listen(self._push)
        try:
            error = await self._stopped
        finally:
            self._feed.unlisten(self._push)
        if error is not None:
            raise fresh(error)

    def _push(self) -> None:
        """There are more tokens, or the turn is over: its last event may have to wait."""
        feed, stopped = self._feed, self._stopped
        assert stopped is not None
        if stopped.done():
            return
        end = len(feed.tokens)
        try:
            if feed.over or end - self._at > MAX_EVENT_TOKENS:
                stopped.set_result(None)
            elif end > self._at:
                if self._writer.write_now(self._event(end)):
                    self._at = end
                else:
                    stopped.set_result(None)
        except Exception as error:  # noqa: BLE001 - the reader's, not the feed's
            stopped.set_result(fresh(error))

    def _event(self, end: int) -> bytes:
        event = self._ask.answer.part(self._index, self._feed, min(self._at, end), end)
        return b"id: %d\n%b" % (end, event) if self._ask.event_ids else event


async def follow_all(followers: Sequence[Follower]) -> None:
    """Run followers of one request side by side. Raises the first error, having ended the rest.

    A TaskGroup would tie tasks, errors and frames into knots that only the collector undoes.
    """
    tasks = [asyncio.create_task(follower.run()) for follower in followers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in done if (error := task.exception()) is not None]
        failed = fresh(errors[0]) if errors else None
        del errors
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed is not None:
        raise fresh(failed)

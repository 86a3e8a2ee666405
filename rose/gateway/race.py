"""The copies of one turn: each with a journal and a feed of its own, the first whole one wins.

    first copy ──────────────────────────┬─ whole: its tokens are the turn's, the other is cancelled
       └─ fork: a copy on another replica ┤
                                          └─ fails: the other goes on alone; of the last: the turn's

Nothing reaches the turn's readers before that, since tokens handed out cannot be taken back.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_scheduler import TurnJournal, TurnNeed, Won
from rose.gateway.dispatcher import LiveAttempt
from rose.gateway.errors import TurnError
from rose.gateway.feed import TurnFeed
from rose.gateway.stats import GatewayStats
from rose.gateway.turn_request import TurnRequest


@dataclass(slots=True, eq=False)
class TurnCopy:
    """Attempts after attempts at one turn. `live` is the one that runs; `avoid` failed last.

    `place` was taken before the copy began. A turn without a race has one copy.
    """

    request: TurnRequest
    journal: TurnJournal
    feed: TurnFeed
    need: TurnNeed
    avoid: str = ""
    place: LiveAttempt | None = None
    live: LiveAttempt | None = None
    number: int = 0
    race: "Race | None" = None

    def need_now(self) -> TurnNeed:
        """What the rest of the turn asks of a replica."""
        journal = self.journal
        return replace(
            self.need,
            prompt_tokens=journal.length,
            budget_tokens=journal.remaining,
            made_tokens=journal.generated,
        )


class Judge(Protocol):
    """Whose answer it is: a member of a hedged group."""

    def finished(self, copy: int) -> Won | None:
        """The copy has its whole answer; None: another had it before."""
        ...

    def failed(self, copy: int) -> bool:
        """The copy came to an end without one; whether it was the last."""
        ...


class Race:
    """`run` it; `fork` it while it runs."""

    def __init__(
        self,
        first: TurnCopy,
        judge: Judge,
        work: Callable[[TurnCopy], Awaitable[None]],
        give_back: Callable[[LiveAttempt], None],
        stats: GatewayStats,
    ) -> None:
        self._feed = first.feed
        self._judge = judge
        self._work = work
        self._give_back = give_back
        self._stats = stats
        self._won = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[int] = asyncio.Queue()
        first.feed = _own_feed(first.request, first.feed)
        first.race = self
        self.copies = [first]

    @property
    def live(self) -> list[tuple[TurnCopy, LiveAttempt]]:
        """Copies that are on a replica now."""
        return [(copy, copy.live) for copy in self.copies if copy.live is not None]

    async def run(self) -> None:
        """Return when a copy was whole. Raises the TurnError of the last one that failed."""
        self._start(self.copies[0])
        try:
            while not self._won:
                number = await self._ended.get()
                error = self._error(number)
                if error is not None:
                    try:
                        raise error
                    finally:
                        # Its frames hold this one: it must not hold the error.
                        del error
            # What is left reads the end of its stream, so that its connection can be used again.
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            if not self._won:
                furthest = max(self.copies, key=lambda copy: len(copy.feed.tokens))
                self._feed.adopt(furthest.feed)
            self._end()

    def _end(self) -> None:
        """Let go of copies and tasks, which hold each other and this race."""
        for copy in self.copies:
            copy.race = None
        self.copies.clear()
        self._tasks.clear()

    def fork(self, number: int, copy: TurnCopy, place: LiveAttempt) -> None:
        """Start copy `number`, which goes on from what `copy` has by now, on a place of its own."""
        name = f"{copy.request.request_id}.copy{number}"
        forked = TurnCopy(
            replace(copy.request, request_id=name),
            copy.journal.fork(),
            _own_feed(copy.request, copy.feed),
            copy.need_now(),
            place=place,
            number=number,
            race=self,
        )
        self.copies.append(forked)
        self._start(forked)

    def delivered(self, copy: TurnCopy) -> None:
        """A copy is whole: if it is the first one, the turn is over at this moment."""
        won = self._judge.finished(copy.number)
        if won is None:
            return
        self._won = True
        self._feed.adopt(copy.feed)
        self._stats.turns += 1
        self._stats.hedge_wins += copy.number > 0
        for number in won.cancel:
            self._tasks[number].cancel()

    def goes_on(self, copy: TurnCopy) -> bool:
        """Whether a copy whose attempt failed tries again: not while another one runs."""
        return self._judge.failed(copy.number)

    def _start(self, copy: TurnCopy) -> None:
        task = asyncio.ensure_future(self._work(copy))
        self._tasks[copy.number] = task
        task.add_done_callback(lambda _: self._over(copy))

    def _over(self, copy: TurnCopy) -> None:
        if copy.place is not None:
            # It was cancelled before it began.
            self._give_back(copy.place)
            copy.place = None
        self._ended.put_nowait(copy.number)

    def _error(self, number: int) -> BaseException | None:
        """Why the turn ends with this copy; None when it is won, or another copy runs."""
        task = self._tasks[number]
        if self._won:
            return None
        if task.cancelled():
            return asyncio.CancelledError()
        error = task.exception()
        if isinstance(error, TurnError) and not self._judge.failed(number):
            return None
        return error


def _own_feed(request: TurnRequest, feed: TurnFeed) -> TurnFeed:
    """Another feed with the tokens of `feed`; their text is settled again, from the tokens."""
    own = TurnFeed(feed.prompt_tokens)
    own.adopt(feed)
    own.text = None if request.text is None else request.text.track()
    if own.text is not None:
        own.text.add(feed.tokens)
    return own

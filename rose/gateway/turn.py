"""One turn, from the first attempt to its last token."""

import asyncio

from elastic_scheduler import Continue, Deliver, End, GiveUp, TurnJournal
from rose.gateway.dispatcher import Dispatcher, EventSink, LiveAttempt
from rose.gateway.errors import DeadlinePassed, NoReplica
from rose.gateway.exchange import ATTEMPT_FAILURES, Ending, Exchange, broken
from rose.gateway.feed import TurnFeed
from rose.gateway.hedging import Hedging
from rose.gateway.links import LINKS
from rose.gateway.race import Race, TurnCopy
from rose.gateway.settings import GatewaySettings
from rose.gateway.sink import AttemptSink
from rose.gateway.stats import GatewayStats
from rose.gateway.turn_request import TurnRequest
from rose.gateway.upstream import Upstream

REST_OF_ANSWER_S = 1.0


class TurnRunner:
    """Runs turns; every attempt is one streamed request."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        upstream: Upstream,
        stats: GatewayStats,
        on_event: EventSink,
        hedging: Hedging,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._stats = stats
        self._on_event = on_event
        self._hedging = hedging

    async def run(self, request: TurnRequest, feed: TurnFeed) -> None:
        """Fill the feed to its end. Raises TurnError when the turn cannot be finished."""
        if request.timeout_s is None:
            await self._run(request, feed)
            return
        try:
            async with asyncio.timeout(request.timeout_s):
                await self._run(request, feed)
        except TimeoutError as error:
            if feed.over:
                return
            raise DeadlinePassed(
                f"the turn was not done after {request.timeout_s:g} s, with "
                f"{len(feed.tokens)} tokens so far; allow it more time"
            ) from error

    async def _run(self, request: TurnRequest, feed: TurnFeed) -> None:
        sampling = request.sampling
        journal = TurnJournal(
            request.token_ids,
            sampling.max_tokens,
            max_attempts=self._settings.max_attempts,
            stop_token_ids=sampling.stop_token_ids or (),
        )
        copy = TurnCopy(request, journal, feed, request.need())
        with self._hedging.member(request.origin) as member:
            if member is None:
                await self._work(copy)
                return
            race = Race(copy, member, self._work, self._give_back, self._stats)
            member.entered(race)
            await race.run()

    async def _work(self, copy: TurnCopy) -> None:
        """Attempt after attempt, until the copy is whole, or another one goes on without it."""
        request, journal = copy.request, copy.journal
        while True:
            live = await self._place_of(copy)
            attempt = journal.begin(live.entry.id, live.entry.kind.value)
            live.may_move = attempt.number < self._settings.max_attempts
            sink = AttemptSink(copy, attempt, self._stats)
            copy.live = live
            try:
                end, reason = await self._attempt(request, live, sink)
            finally:
                copy.live = None
            outcome = sink.end(end, reason)
            if isinstance(outcome, Deliver):
                return
            if copy.race is not None and not copy.race.goes_on(copy):
                return
            if isinstance(outcome, GiveUp):
                raise NoReplica(f"{journal.attempts} replicas failed the turn, the last: {reason}")
            assert isinstance(outcome, Continue)
            copy.avoid = live.entry.id
            copy.need = copy.need_now()
            self._note_continuation(request.request_id, live, end, reason, journal)

    async def _place_of(self, copy: TurnCopy) -> LiveAttempt:
        """The place that the copy was given, or one that it has to wait for."""
        live, copy.place = copy.place, None
        if live is None:
            live = await self._dispatcher.acquire(copy.need, copy.avoid, copy.request.priority)
        return live

    def _give_back(self, live: LiveAttempt) -> None:
        self._dispatcher.finish(live, None)

    async def _attempt(self, request: TurnRequest, live: LiveAttempt, sink: AttemptSink) -> Ending:
        """Stream one attempt into the journal; how it ended and, in words, why."""
        end: End | None = None
        reason = ""
        live.task = asyncio.current_task()
        try:
            if live.interrupted is not None:
                end, reason = live.interrupted, "lease lost"
            else:
                end, reason = await self._stream(request, live, sink)
        except ATTEMPT_FAILURES as error:
            end, reason = broken(error)
        except asyncio.CancelledError:
            # Ours (interrupt), or the client is gone as well: only ours alone goes on.
            if live.interrupted is None or live.task is None or live.task.uncancel() > 0:
                raise
            end, reason = live.interrupted, live.interrupted.value
        finally:
            live.task = None
            if not sink.delivered:
                self._dispatcher.finish(live, end)
        return end, reason

    async def _stream(self, request: TurnRequest, live: LiveAttempt, sink: AttemptSink) -> Ending:
        link = LINKS[live.entry.api]
        body = link.encode(request, sink.attempt)
        exchange = Exchange(link.reader(), live, sink, self._dispatcher)
        connection = await self._upstream.post(live.entry.url + link.path, body, exchange)
        rest_s = 0.0
        try:
            end, reason = await exchange.ending()
            # A few bytes end the answer, and the connection can be used again. Of a stop string
            # the engine knows nothing: hanging up ends its work.
            rest_s = 0.0 if end is End.BROKEN or sink.stopped else REST_OF_ANSWER_S
            return end, reason
        finally:
            exchange.cancel()
            connection.leave(exchange, rest_s)

    def _note_continuation(
        self, request_id: str, live: LiveAttempt, end: End, reason: str, journal: TurnJournal
    ) -> None:
        self._stats.continuations += 1
        self._on_event(
            "continuation",
            request_id=request_id,
            replica=live.entry.id,
            end=end.value,
            reason=reason,
            journaled=journal.generated,
            attempt=journal.attempts,
        )

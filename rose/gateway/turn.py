"""One turn, from the first attempt to its last token."""

import asyncio

import aiohttp
import msgspec

from elastic_scheduler import (
    Attempt,
    Continue,
    Deliver,
    End,
    GiveUp,
    JournalError,
    Outcome,
    TurnJournal,
)
from rose.gateway.dispatcher import Dispatcher, EventSink, LiveAttempt
from rose.gateway.errors import BadRequest, DeadlinePassed, NoReplica
from rose.gateway.feed import TurnFeed
from rose.gateway.hedging import Hedging
from rose.gateway.links import LINKS, Link, LinkError, ReplicaLine
from rose.gateway.race import Race, TurnCopy
from rose.gateway.settings import GatewaySettings
from rose.gateway.stats import GatewayStats
from rose.gateway.turn_request import TurnRequest

JSON_HEADERS = {"Content-Type": "application/json"}
DRAIN_S = 1.0
# What a replica says about the request itself: another replica would say the same.
REQUEST_FAULTS = frozenset({400, 404, 413, 422})
ENDS = {"stop": End.FINISHED, "length": End.FINISHED, "revoked": End.REVOKED, "abort": End.REVOKED}
# All that a replica can do wrong within one attempt.
ATTEMPT_FAILURES = (
    aiohttp.ClientError,
    OSError,
    OverflowError,
    msgspec.MsgspecError,
    JournalError,
    LinkError,
)


class TurnRunner:
    """Runs turns over one HTTP session; every attempt is one streamed request."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        session: aiohttp.ClientSession,
        stats: GatewayStats,
        on_event: EventSink,
        hedging: Hedging,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._session = session
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
            sink = _Sink(copy, attempt, self._stats)
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

    async def _attempt(
        self, request: TurnRequest, live: LiveAttempt, sink: "_Sink"
    ) -> tuple[End, str]:
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
            end, reason = End.BROKEN, f"{type(error).__name__}: {error}"
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

    async def _stream(
        self, request: TurnRequest, live: LiveAttempt, sink: "_Sink"
    ) -> tuple[End, str]:
        link = LINKS[live.entry.api]
        body = link.encode(request, sink.attempt)
        url = live.entry.url + link.path
        async with self._session.post(url, data=body, headers=JSON_HEADERS) as response:
            if response.status == 200:
                return await self._read(response, link, live, sink)
            text = (await response.content.read(2_048)).decode("utf-8", "replace")
            if response.status in REQUEST_FAULTS:
                raise BadRequest(f"{live.entry.id} refuses the turn: {text}")
            end = End.REFUSED if response.status == 503 else End.BROKEN
            return end, f"HTTP {response.status}"

    async def _read(
        self, response: aiohttp.ClientResponse, link: Link, live: LiveAttempt, sink: "_Sink"
    ) -> tuple[End, str]:
        reader, content = link.reader(), response.content
        while data := await content.readany():
            for line in reader.feed(data):
                if line.token_ids:
                    if not live.need.accepts(line.version):
                        return End.BROKEN, f"tokens of version {line.version}"
                    taken = sink.take(line)
                    self._dispatcher.journaled(live, taken)
                    if sink.stopped:
                        # The engine knows nothing of stop strings: hanging up ends its work.
                        response.close()
                        return self._finished(live, sink, "stop")
                if line.finish_reason is not None:
                    end = ENDS.get(line.finish_reason, End.BROKEN)
                    if end is not End.FINISHED:
                        return end, line.message or line.finish_reason
                    finished = self._finished(live, sink, line.finish_reason)
                    await _drain(content)
                    return finished
        return End.BROKEN, "the stream ended without a finish reason"

    def _finished(self, live: LiveAttempt, sink: "_Sink", reason: str) -> tuple[End, str]:
        """The turn is complete: hand it over and free its place before any more waiting.

        From here on nothing may interrupt it.
        """
        live.task = None
        sink.end(End.FINISHED, reason)
        self._dispatcher.finish(live, End.FINISHED)
        return End.FINISHED, reason

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


class _Sink:
    """Where the tokens of one attempt go: text first (it may cut them), journal, feed."""

    __slots__ = ("_copy", "_feed", "_journal", "_outcome", "_stats", "attempt")

    def __init__(self, copy: TurnCopy, attempt: Attempt, stats: GatewayStats) -> None:
        self._stats = stats
        self._copy = copy
        self._journal = copy.journal
        self._feed = copy.feed
        self._outcome: Outcome | None = None
        self.attempt = attempt

    @property
    def delivered(self) -> bool:
        """Whether the attempt completed its turn."""
        return self._outcome is not None

    def end(self, end: End, reason: str) -> Outcome | None:
        """End the attempt, once; a complete turn goes to its readers at that moment."""
        if self._outcome is None:
            outcome = self._journal.end(self.attempt.number, end, reason)
            if isinstance(outcome, Deliver):
                stop_reason = _stop_reason(self._copy.request, self._feed, outcome)
                self._feed.deliver(outcome, stop_reason)
                if self._copy.race is None:
                    self._stats.turns += 1
                else:
                    self._copy.race.delivered(self._copy)
            self._outcome = outcome
        return self._outcome

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the turn."""
        return self._feed.text is not None and self._feed.text.matched is not None

    def take(self, line: ReplicaLine) -> int:
        """Journal a line's tokens, up to a stop string; how many."""
        tokens, logprobs = line.token_ids, line.logprobs
        if self._feed.text is not None:
            kept = self._feed.text.add(tokens)
            if kept < len(tokens):
                tokens, logprobs = tokens[:kept], logprobs[:kept]
        stamp = (line.version, line.oldest_version)
        self._journal.append(self.attempt.number, tokens, logprobs, *stamp)
        self._feed.add(tokens, logprobs, *stamp)
        return len(tokens)


def _stop_reason(request: TurnRequest, feed: TurnFeed, turn: Deliver) -> int | str | None:
    """As vLLM has it: the stop string or stop token that ended the turn, None for anything else."""
    if turn.finish_reason != "stop":
        return None
    if feed.text is not None and feed.text.matched is not None:
        return feed.text.matched
    last = turn.token_ids[-1] if turn.token_ids else None
    return last if last in (request.sampling.stop_token_ids or ()) else None


async def _drain(content: aiohttp.StreamReader) -> None:
    """Read the terminator after the last line, so that the connection can be used again."""
    if content.at_eof():
        return
    try:
        async with asyncio.timeout(DRAIN_S):
            while await content.readany():
                continue
    except (aiohttp.ClientError, OSError):
        # TimeoutError is an OSError. A connection that breaks here is not reused; nothing is lost.
        return

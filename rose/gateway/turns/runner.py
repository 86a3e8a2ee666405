"""Turn runner: one turn from its first attempt to its last token, shared by all its callers.

`SharedTurns` keeps turns by request id: a second call with the same id follows the running turn.

open ── running ── over: kept among the newest answers, replayed for repeated requests
           │  its last reader left: cancelled, at once or after a grace in which it may come back
           └─ failed or cancelled: forgotten, the id may be used anew
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from elastic_scheduler import (
    Conflict,
    Continue,
    Deliver,
    End,
    GiveUp,
    IdempotencyCache,
    TurnJournal,
)
from rose.gateway.backends.batches import TurnBatches
from rose.gateway.backends.http_pool import Upstream
from rose.gateway.errors import (
    BadRequest,
    DeadlinePassed,
    EnginesEnded,
    NoReplica,
    TurnAborted,
    TurnError,
)
from rose.gateway.replicas.dispatcher import Dispatcher, EventSink, LiveAttempt
from rose.gateway.settings import GatewaySettings
from rose.gateway.stats import GatewayStats
from rose.gateway.turn_request import TurnRequest
from rose.gateway.turns.attempt import AttemptStream
from rose.gateway.turns.hedging import Hedging, Race, TurnCopy
from rose.gateway.turns.token_stream import TokenStream
from rose.tracing import NO_SPANS, Span, Spans

MOST_ENGINES_ENDED = 2
"""Engines that may end at a turn before its first token, since the turn may be the cause."""


class TurnRunner:
    """Runner of turns; every attempt is one streamed request, or its part of one."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        upstream: Upstream,
        stats: GatewayStats,
        on_event: EventSink,
        hedging: Hedging,
        spans: Spans = NO_SPANS,
    ) -> None:
        self._spans = spans
        self._settings = settings
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._batches = TurnBatches(upstream, settings.turns_per_request)
        self._stats = stats
        self._on_event = on_event
        self._hedging = hedging

    async def run(self, request: TurnRequest, feed: TokenStream) -> None:
        """Fill the feed's journal to its end. Raises TurnError if the turn cannot be finished."""
        parent = request.origin.trace
        if parent is None and self._spans is NO_SPANS:
            await self._run(request, feed)
            return
        span = self._spans.begin("rose turn", parent, {"rose.request_id": request.request_id})
        # Its attempts are parts of it.
        request.origin = replace(request.origin, trace=span.context)
        error = "it was given up"
        try:
            await self._run(request, feed)
            error = ""
        except TurnError as failed:
            error = str(failed)
            raise
        finally:
            self._note_traced(request, feed, error, span)

    def _note_traced(self, request: TurnRequest, feed: TokenStream, error: str, span: Span) -> None:
        """End the span of a traced turn; the event log gets it if it is recorded."""
        replicas = list(dict.fromkeys(segment.replica for segment in feed.segments))
        tokens = len(feed.tokens)
        span.end({"rose.tokens": tokens, "rose.attempts": feed.attempts}, error)
        trace = span.context
        if trace is not None and trace.sampled:
            self._on_event(
                "turn_traced",
                trace_id=trace.trace_id,
                request_id=request.request_id,
                session=request.origin.session,
                job=request.origin.job,
                replicas=replicas,
                tokens=tokens,
                attempts=feed.attempts,
                error=error[:500],
            )

    async def _run(self, request: TurnRequest, feed: TokenStream) -> None:
        try:
            async with asyncio.timeout(request.timeout_s):
                with self._hedging.judge(request.origin) as judge:
                    give_back, stats = self._give_back, self._stats
                    await Race(request, feed, judge, self._work, give_back, stats).run()
        except TimeoutError as error:
            if feed.over:
                return
            raise DeadlinePassed(
                f"the turn was not done after {request.timeout_s:g} s, with "
                f"{len(feed.tokens)} tokens so far; allow it more time"
            ) from error

    async def _work(self, race: Race, copy: TurnCopy) -> None:
        """Make attempt after attempt, until the copy is whole, or another one continues alone."""
        journal = copy.journal
        engines_ended = 0
        while True:
            live = await self._place_of(copy)
            copy.belongs_to(live)
            attempt = self._attempt(race, copy, live)
            live.may_move = journal.attempts < self._settings.max_attempts
            copy.live = live
            try:
                end, reason = await attempt.run(self._upstream)
            finally:
                copy.live = None
            if isinstance(attempt.outcome, Deliver) or not race.goes_on(copy):
                return
            if isinstance(attempt.outcome, GiveUp):
                raise NoReplica(f"{journal.attempts} replicas failed the turn, the last: {reason}")
            assert isinstance(attempt.outcome, Continue)
            engines_ended += attempt.engine_ended and not journal.generated
            if engines_ended == MOST_ENGINES_ENDED:
                raise EnginesEnded(
                    f"{engines_ended} replicas ended before this turn's first token, the last:"
                    f" {live.entry.id}: {reason}; it is not sent to another one"
                )
            copy.avoid = live.entry.id
            self._note_continuation(copy.request.request_id, live, end, reason, journal)
            if copy.request.sampling.counts_output:
                copy.restart()
                journal = copy.journal
            copy.need = copy.need_now()

    def _attempt(self, race: Race, copy: TurnCopy, live: LiveAttempt) -> AttemptStream:
        """Make one attempt on that place; the simulator puts a modelled replica behind it."""
        return AttemptStream(race, copy, live, self._dispatcher, self._spans, self._batches)

    async def _place_of(self, copy: TurnCopy) -> LiveAttempt:
        """Return the copy's place, or wait for one."""
        live, copy.place = copy.place, None
        if live is None:
            asked = copy.request
            live = await self._dispatcher.acquire(
                copy.need, copy.avoid, asked.priority, batch=asked.batch
            )
        return live

    def _give_back(self, live: LiveAttempt) -> None:
        self._dispatcher.finish(live, None)

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


@dataclass(slots=True, eq=False)
class SharedTurn:
    """A running or answered turn and the number of connections that follow it.

    name: its caller's scope and its request id.
    """

    request_id: str
    name: str
    job: str
    session: str
    named: bool
    feed: TokenStream
    task: "asyncio.Task[None] | None" = None
    readers: int = 0
    last_call: asyncio.TimerHandle | None = None

    @property
    def key(self) -> str:
        """Its name among all turns: two jobs may use one request id."""
        return _key(self.job, self.name)


def _key(job: str, name: str) -> str:
    # No name of a job has a newline.
    return f"{job}\n{name}"


class SharedTurns:
    """All turns of one gateway. End with `close`."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        runner: TurnRunner,
        stats: GatewayStats,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._runner = runner
        self._stats = stats
        self._answers: IdempotencyCache[SharedTurn] = IdempotencyCache(
            settings.answers_kept, settings.answers_bytes
        )
        self._running: dict[str, SharedTurn] = {}
        self._closing = False

    def __len__(self) -> int:
        return len(self._running)

    def open(self, request: TurnRequest) -> SharedTurn:
        """Return the turn of an earlier request with this id and body, or a new one.

        Raises TurnError for a turn that must not begin.
        """
        request.check()
        fingerprint = request.fingerprint()
        named = self._dispatcher.resolve(request.origin.job)
        request.origin = replace(request.origin, job=named)
        job = self._dispatcher.owner(named)
        key = _key(job, request.name)
        # After the fingerprint: repeated under a newer version it is the same turn.
        request.min_version = self._dispatcher.min_version_of(
            named, request.min_version, request.exact_version
        )
        known = self._answers.find(key, fingerprint)
        if isinstance(known, Conflict):
            raise BadRequest(f"{known.value}: {request.request_id}", "request_id")
        if known is not None:
            self._stats.repeated += 1
            return known
        if self._closing:
            raise NoReplica("the gateway is shutting down; send the turn again later")
        self._dispatcher.check_admission(request.need())
        text = None if request.text is None else request.text.track(request.token_ids)
        feed = TokenStream(request.journal(self._settings.max_attempts), text)
        origin = request.origin
        session = origin.scope + origin.session
        shared = SharedTurn(request.request_id, request.name, job, session, request.named, feed)
        shared.task = asyncio.create_task(self._run(request, shared))
        self._answers.open(key, fingerprint, shared)
        self._running[key] = shared
        return shared

    @contextmanager
    def reading(self, turns: Sequence[SharedTurn], stream: bool) -> Iterator[None]:
        """Count a connection for as long as it follows these turns.

        A turn without a follower is cancelled; one that was streamed to a caller who can name it is
        kept for `resume_grace_s`: the caller may come back for the rest.
        """
        for shared in turns:
            shared.readers += 1
            if shared.last_call is not None:
                shared.last_call.cancel()
                shared.last_call = None
        try:
            yield
        finally:
            for shared in turns:
                shared.readers -= 1
                if shared.readers == 0 and not shared.feed.over:
                    self._abandon(shared, self._grace_s(shared) if stream else 0.0)

    def cancel(self, name: str, job: str = "") -> bool:
        """Abort a job's running turn; its readers get a TurnAborted. Returns False without one.

        name: its caller's scope and its request id.
        """
        shared = self._running.get(_key(job, name))
        if shared is None:
            return False
        shared.feed.fail(TurnAborted(f"the turn {shared.request_id} was aborted"))
        self._drop(shared)
        return True

    def finish_session(self, job: str, session: str) -> int:
        """Abort the running turns of a job's session, named with its scope; return their number."""
        running = tuple(self._running.values())
        names = [each.name for each in running if (each.job, each.session) == (job, session)]
        return sum(self.cancel(name, job) for name in names)

    async def close(self, timeout_s: float) -> None:
        """Refuse new turns, let running ones finish for a while, then cancel them."""
        self._closing = True
        tasks = [shared.task for shared in self._running.values() if shared.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for shared in list(self._running.values()):
            shared.feed.fail(NoReplica("the gateway is shutting down; send the turn again later"))
            self._drop(shared)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _grace_s(self, shared: SharedTurn) -> float:
        settings = self._settings
        return settings.resume_grace_s if shared.named else settings.anonymous_grace_s

    def _abandon(self, shared: SharedTurn, grace_s: float) -> None:
        if grace_s <= 0:
            self._drop(shared)
            return
        loop = asyncio.get_running_loop()
        shared.last_call = loop.call_later(grace_s, self._drop, shared)

    def _drop(self, shared: SharedTurn) -> None:
        """End an unwanted turn; its id may be used anew."""
        self._running.pop(shared.key, None)
        self._answers.forget(shared.key, shared)
        if shared.last_call is not None:
            shared.last_call.cancel()
        # A turn that never began would keep its task, and the task this turn.
        task, shared.task = shared.task, None
        if task is not None:
            task.cancel()

    async def _run(self, request: TurnRequest, shared: SharedTurn) -> None:
        try:
            await self._runner.run(request, shared.feed)
        except TurnError as error:
            self._answers.forget(shared.key, shared)
            shared.feed.fail(error)
        except BaseException:
            # Cancelled, or a fault of this program, for which its readers must not wait.
            self._answers.forget(shared.key, shared)
            shared.feed.fail(TurnError("the gateway gave the turn up: send it again"))
            raise
        finally:
            # A cancelled task keeps the frames of its last moment, and so this turn.
            shared.task = None
            if shared.feed.finish_reason is None:
                self._stats.failed += 1
            if self._running.get(shared.key) is shared:
                del self._running[shared.key]
        self._settle(shared)

    def _settle(self, shared: SharedTurn) -> None:
        if shared.feed.finish_reason is not None:
            size_bytes = shared.feed.size_bytes + 4 * len(shared.key)
            self._answers.close(shared.key, shared, size_bytes)
        if shared.last_call is not None:
            shared.last_call.cancel()
            shared.last_call = None

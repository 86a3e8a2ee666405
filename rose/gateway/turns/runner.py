"""Turn runner: one turn from its first attempt to its last token, shared by all its callers.

`SharedTurns` keeps turns by request id: a second call with the same id follows the running turn.

open ── running ── over: kept among the newest answers, replayed for repeated requests
           │  its last reader left: cancelled, at once or after a grace in which it may come back
           └─ failed or cancelled: forgotten, the id may be used anew
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from elastic_scheduler import Conflict, Continue, Deliver, GiveUp, IdempotencyCache
from rose.gateway.backends.batches import BatchCollector
from rose.gateway.backends.http_pool import Upstream
from rose.gateway.backends.images import ImageSender
from rose.gateway.errors import (
    BadRequest,
    DeadlinePassed,
    EnginesEnded,
    NoReplica,
    TurnAborted,
    TurnError,
)
from rose.gateway.replicas.dispatcher import Dispatcher, LiveAttempt
from rose.gateway.turn_request import TurnRequest
from rose.gateway.turns.attempt import AttemptStream, TurnAttempts
from rose.gateway.turns.hedging import Hedging
from rose.gateway.turns.token_stream import TokenStream
from rose.tracing import NO_SPANS, Span, Spans

MOST_ENGINES_ENDED = 2
"""Engines that may end at a turn before its first token, since the turn may be the cause."""


class TurnRunner:
    """Runner of turns: it makes attempt after attempt on replicas until a turn is whole."""

    def __init__(
        self, dispatcher: Dispatcher, upstream: Upstream, hedging: Hedging, spans: Spans = NO_SPANS
    ) -> None:
        self._dispatcher = dispatcher
        self._settings = dispatcher.settings
        self._upstream = upstream
        self._batches = BatchCollector(upstream, self._settings.turns_per_request)
        self._images = ImageSender(upstream)
        self._hedging = hedging
        self._spans = spans

    async def run(self, request: TurnRequest, feed: TokenStream) -> None:
        """Run a turn until the feed's journal is whole. Raises TurnError if the turn cannot be
        finished.
        """
        parent = request.origin.trace
        if parent is None and self._spans is NO_SPANS:
            await self._run(request, feed)
            return
        span = self._spans.begin("rose turn", parent, {"rose.request_id": request.request_id})
        # The spans of the turn's attempts are children of this span.
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
        """End the span of a traced turn, and write it to the event log if the trace is sampled."""
        replicas = list(dict.fromkeys(segment.replica for segment in feed.segments))
        tokens = len(feed.tokens)
        span.end({"rose.tokens": tokens, "rose.attempts": feed.attempts}, error)
        trace = span.context
        if trace is not None and trace.sampled:
            self._dispatcher.on_event(
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
                if request.origin.hedges:
                    await self._hedging.run(request, feed, self._work)
                else:
                    await self._work(TurnAttempts(request, feed))
        except TimeoutError as error:
            if feed.over:
                return
            raise DeadlinePassed(
                f"the turn was not done after {request.timeout_s:g} s, with "
                f"{len(feed.tokens)} tokens so far; allow it more time"
            ) from error

    async def _work(self, turn: TurnAttempts) -> None:
        """Make attempts until the turn is whole or another copy continues alone. Raises NoReplica
        or EnginesEnded.
        """
        engines_ended = 0
        while True:
            live = await turn.place(self._dispatcher)
            turn.begin(live, self._settings.max_attempts)
            attempt = self._attempt(turn, live)
            try:
                end, reason = await attempt.run(self._upstream)
            finally:
                turn.live = None
            if isinstance(attempt.outcome, Deliver) or not turn.goes_on():
                return
            journal = turn.journal
            if isinstance(attempt.outcome, GiveUp):
                raise NoReplica(f"{journal.attempts} replicas failed the turn, the last: {reason}")
            assert isinstance(attempt.outcome, Continue)
            engines_ended += attempt.engine_ended and not journal.generated
            if engines_ended == MOST_ENGINES_ENDED:
                raise EnginesEnded(
                    f"{engines_ended} replicas ended before this turn's first token, the last:"
                    f" {live.entry.id}: {reason}; it is not sent to another one"
                )
            self._dispatcher.stats.continuations += 1
            self._dispatcher.on_event(
                "continuation",
                request_id=turn.request.request_id,
                replica=live.entry.id,
                end=end.value,
                reason=reason,
                journaled=journal.generated,
                attempt=journal.attempts,
            )
            turn.next_try(live.entry.id)

    def _attempt(self, turn: TurnAttempts, live: LiveAttempt) -> AttemptStream:
        """Return a new attempt at the turn on that place; the simulator overrides it with a
        modelled replica.
        """
        return AttemptStream(turn, live, self._dispatcher, self._spans, self._batches, self._images)


class SharedTurn(TokenStream):
    """Token stream of a running or answered turn, shared by all connections that follow it.

    readers: number of those connections. name: its caller's scope and its request id. job: its
    registered job, "" where jobs are labels.
    """

    __slots__ = ("job", "last_call", "name", "named", "readers", "request_id", "session", "task")

    def __init__(self, request: TurnRequest, job: str, max_attempts: int) -> None:
        text = None if request.text is None else request.text.track(request.token_ids)
        super().__init__(request.journal(max_attempts), text)
        self.request_id = request.request_id
        self.name = request.name
        self.job = job
        self.session = request.origin.scope + request.origin.session
        self.named = request.named
        self.task: asyncio.Task[None] | None = None
        self.readers = 0
        self.last_call: asyncio.TimerHandle | None = None

    @property
    def key(self) -> str:
        """Key of the turn among all turns: job and name, since two jobs may use one request id."""
        return _key(self.job, self.name)


def _key(job: str, name: str) -> str:
    # No name of a job has a newline.
    return f"{job}\n{name}"


class SharedTurns:
    """Turns of one gateway by job and request id, with kept answers for repeated requests. End with
    `close`.
    """

    def __init__(self, dispatcher: Dispatcher, runner: TurnRunner) -> None:
        self._dispatcher = dispatcher
        self._runner = runner
        self._settings = settings = dispatcher.settings
        self._stats = dispatcher.stats
        self._answers: IdempotencyCache[SharedTurn] = IdempotencyCache(
            settings.answers_kept, settings.answers_bytes
        )
        self._running: dict[str, SharedTurn] = {}
        self._closing = False

    def __len__(self) -> int:
        return len(self._running)

    def open(self, request: TurnRequest) -> SharedTurn:
        """Return the running or answered turn of an earlier request with this id and body, or start
        and return a new one.

        Raises TurnError for a turn that must not begin, or an id that was used with another body.
        """
        request.check()
        fingerprint = request.fingerprint()
        named = self._dispatcher.jobs.resolve(request.origin.job)
        request.origin = replace(request.origin, job=named)
        job = self._dispatcher.jobs.owner(named)
        key = _key(job, request.name)
        # Set it after the fingerprint: repeated under a newer version it is the same turn.
        request.min_version = self._dispatcher.default_versions.min_version_of(
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
        shared = SharedTurn(request, job, self._settings.max_attempts)
        shared.task = asyncio.create_task(self._run(request, shared))
        self._answers.open(key, fingerprint, shared)
        self._running[key] = shared
        return shared

    @contextmanager
    def reading(self, turns: Sequence[SharedTurn], stream: bool) -> Iterator[None]:
        """Return a context manager that counts one connection as a follower of these turns.

        A turn whose last follower leaves is cancelled; a streamed one only after `resume_grace_s`
        if its caller chose the id, else after `anonymous_grace_s`.
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
                if shared.readers == 0 and not shared.over:
                    self._abandon(shared, self._grace_s(shared) if stream else 0.0)

    def cancel(self, name: str, job: str = "") -> bool:
        """Abort a job's running turn, whose readers get a TurnAborted, and return True; return
        False if none runs.

        name: its caller's scope and its request id.
        """
        shared = self._running.get(_key(job, name))
        if shared is None:
            return False
        shared.fail(TurnAborted(f"the turn {shared.request_id} was aborted"))
        self._drop(shared)
        return True

    def finish_session(self, job: str, session: str) -> int:
        """Abort the running turns of a job's session, named with its scope; return their number."""
        running = tuple(self._running.values())
        names = [each.name for each in running if (each.job, each.session) == (job, session)]
        return sum(self.cancel(name, job) for name in names)

    async def close(self, timeout_s: float) -> None:
        """Refuse new turns, wait up to `timeout_s` seconds for running ones, then fail and cancel
        the rest.
        """
        self._closing = True
        tasks = [shared.task for shared in self._running.values() if shared.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for shared in list(self._running.values()):
            shared.fail(NoReplica("the gateway is shutting down; send the turn again later"))
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
        """Cancel a turn and forget it, so that its id may be used anew."""
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
            await self._runner.run(request, shared)
        except TurnError as error:
            self._answers.forget(shared.key, shared)
            shared.fail(error)
        except BaseException:
            # The task was cancelled, or this program has a fault; readers must not wait for either.
            self._answers.forget(shared.key, shared)
            shared.fail(TurnError("the gateway gave the turn up: send it again"))
            raise
        finally:
            # A cancelled task keeps the frames of its last moment, and so this turn.
            shared.task = None
            if shared.finish_reason is None:
                self._stats.failed += 1
            if self._running.get(shared.key) is shared:
                del self._running[shared.key]
        self._settle(shared)

    def _settle(self, shared: SharedTurn) -> None:
        if shared.finish_reason is not None:
            size_bytes = shared.size_bytes + 4 * len(shared.key)
            self._answers.close(shared.key, shared, size_bytes)
        if shared.last_call is not None:
            shared.last_call.cancel()
            shared.last_call = None

"""Attempts at a turn: one replica after the other, from its answer's bytes to the turn's journal.

`TurnAttempts` is the state that a turn takes from one replica to the next, and `AttemptStream` one
replica's answer. Everything happens in the step of the event loop in which the bytes came: they are
decoded, cut where text stops, journaled and passed to readers. Only the attempt's end is awaited.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
from msgspec import structs

from elastic_scheduler import Attempt, Deliver, End, JournalError, Outcome, TurnJournal, TurnNeed
from rose.contract.replica import NO_IMAGE, PromptLogprobs, StreamLine, top_row_bytes
from rose.gateway.backends.batches import BatchCollector, BatchedTurn
from rose.gateway.backends.http_pool import OK, Upstream, UpstreamConnection
from rose.gateway.backends.images import ImageSender
from rose.gateway.backends.replica_apis import LINKS, AnswerReader, BackendError, fault_message
from rose.gateway.errors import BadRequest, fresh
from rose.gateway.replicas.dispatcher import Dispatcher, Ending, LiveAttempt
from rose.gateway.text_codec import TextTrack
from rose.gateway.turn_request import TurnRequest
from rose.gateway.turns.token_stream import ROUTED_EXPERTS, TOP_LOGPROBS, TokenStream
from rose.tracing import NO_SPANS, Attributes, Spans

REST_OF_ANSWER_S = 1.0
# Statuses about the request itself: another replica would return the same.
REQUEST_FAULTS = frozenset({400, 404, 413, 422})
UNAVAILABLE = 503
MAX_FAULT_BYTES = 2_048
MOST_PROMPT_TOKENS = 1 << 22
# Errors of an engine that still knows the attempt's id, which the gateway chose: never the caller's
# fault.
KNOWN_ID = re.compile("duplicate request id|already running", re.IGNORECASE)
ENDS = {"stop": End.FINISHED, "length": End.FINISHED, "revoked": End.REVOKED, "abort": End.REVOKED}
# All errors of a replica within one attempt.
ATTEMPT_FAILURES = (
    OSError,
    OverflowError,
    RecursionError,
    UnicodeError,
    msgspec.MsgspecError,
    JournalError,
    BackendError,
)
T = TypeVar("T")


class TurnAttempts:
    """State of one turn over its successive attempts: journal, text, remaining need, and `avoid`,
    the replica that failed it last.

    Readers see the journal as it grows. A turn that would start over on another replica
    (`Sampling.counts_output`) is shown only when it is whole, since delivered tokens cannot be
    taken back.
    """

    def __init__(self, request: TurnRequest, feed: TokenStream) -> None:
        self.request = request
        self.feed = feed
        self.journal: TurnJournal = feed.journal
        self.text: TextTrack | None = feed.text
        self.need = request.need()
        self.avoid = ""
        self.live: LiveAttempt | None = None
        if request.sampling.counts_output:
            self.journal, self.text = self.forked()

    @property
    def matched(self) -> str | None:
        """Stop string that ended the turn, None if none did."""
        return None if self.text is None else self.text.matched

    @property
    def stop_reason(self) -> int | str | None:
        """Stop string or stop token id that ended the turn, as vLLM reports it; None for an
        end-of-sequence token or another end.
        """
        if self.journal.finish_reason != "stop" or self.matched is not None:
            return self.matched
        last = self.journal.tokens[-1] if self.journal.tokens else None
        sampling, text = self.request.sampling, self.text
        if text is not None and last == text.plan.codec.end_of_sequence and not sampling.ignore_eos:
            return None
        return last if last in (sampling.stop_token_ids or ()) else None

    async def place(self, dispatcher: Dispatcher) -> LiveAttempt:
        """Wait for a place on a replica for the rest of the turn and return it. Raises TurnError if
        there is none in time.
        """
        request = self.request
        return await dispatcher.acquire(
            self.need, self.avoid, request.priority, batch=request.batch
        )

    def begin(self, live: LiveAttempt, max_attempts: int) -> None:
        """Record the place of the next attempt, its job, and if the turn may still move to another
        replica afterwards.
        """
        self.request.job = live.job
        self.need = replace(self.need, job=live.need.job)
        live.may_move = self.journal.attempts + 1 < max_attempts
        self.live = live

    def deliver(self) -> bool:
        """Show the whole turn to its readers and end their stream; return False if they got another
        copy's answer.
        """
        self.feed.show(self.journal, self.text)
        self.feed.end(self.stop_reason)
        return True

    def goes_on(self) -> bool:
        """Return True if the turn is tried again after a failed attempt."""
        return True

    def next_try(self, failed: str) -> None:
        """Prepare the turn for another attempt, on any replica but `failed`; a turn whose output
        counts starts over.
        """
        self.avoid = failed
        if self.request.sampling.counts_output:
            # Elsewhere its tokens would not count as output.
            self.journal = self.journal.restarted()
            self.text = self._track()
        self.need = self.need_now()

    def need_now(self) -> TurnNeed:
        """Return the routing need of the rest of the turn: tokens so far as prompt, and the tokens
        left.
        """
        journal = self.journal
        return replace(
            self.need,
            prompt_tokens=journal.length,
            budget_tokens=journal.remaining,
            made_tokens=journal.generated,
        )

    def expand(self, prompt: list[int]) -> None:
        """Continue from this prompt, which has the tokens of the turn's images."""
        self.journal.expand(prompt)
        self.feed.expanded = prompt
        if self.feed.journal is not self.journal and not self.feed.tokens:
            self.feed.journal.expand(prompt)

    def forked(self) -> tuple[TurnJournal, TextTrack | None]:
        """Return a copy of the journal that can continue on its own, and a text decoded from its
        tokens (None without text).
        """
        text = self._track()
        if text is not None:
            text.add(self.journal.tokens)
        return self.journal.fork(), text

    def _track(self) -> TextTrack | None:
        plan = self.request.text
        return None if plan is None else plan.track(self.request.token_ids)


@dataclass(slots=True, eq=False)
class AttemptStream:
    """One attempt: the streamed request to one replica and the receiver of its answer.

    outcome: what the journal says to do next, None until the attempt has ended. batches: collector
    that joins turns into one request, None sends each alone. images: sender of a turn's images to
    replicas. engine_ended: True if the replica had the request and hung up before it sent a token.
    """

    turn: TurnAttempts
    live: LiveAttempt
    dispatcher: Dispatcher
    spans: Spans = NO_SPANS
    batches: BatchCollector | None = None
    images: ImageSender | None = None
    outcome: Outcome | None = None
    engine_ended: bool = False
    _status: int = 0
    _fault: bytes = b""
    _prompt_seen: bool = False
    # Experts of the prompt's positions, until the first token comes.
    _lead: bytearray = field(default_factory=bytearray)
    # Prompt with the tokens of its images, until another line comes.
    _expanded: list[int] = field(default_factory=list)
    _asked: Attempt = field(init=False)
    _reader: AnswerReader = field(init=False)
    # The future never holds an error that was raised here: its frames and this attempt would
    # reference each other.
    _over: "asyncio.Future[Ending | Exception]" = field(init=False)

    def __post_init__(self) -> None:
        entry = self.live.entry
        self._asked = self.turn.journal.begin(entry.id, entry.kind.value)
        self._reader = LINKS[entry.api].reader(self.turn.request.sampling.logprobs)
        self._over = asyncio.get_running_loop().create_future()

    async def run(self, upstream: Upstream) -> Ending:
        """Stream the replica's answer into the journal; return how the attempt ended, and the
        reason in words.

        Raises BadRequest for a request that every replica would refuse, or an internal error.
        """
        end: End | None = None
        try:
            end, reason = await self.live.run(lambda: self._traced(upstream))
        except ATTEMPT_FAILURES as error:
            end, reason = _broken(error)
        finally:
            if self.outcome is None:
                self.dispatcher.finish(self.live, end)
        if self.outcome is None:
            self._end(end, reason)
        return end, reason

    # ---- `Receiver` ----

    def status(self, code: int) -> None:
        self._status = code

    def body(self, data: bytes) -> None:
        if self._status != OK:
            self._fault += data[: MAX_FAULT_BYTES - len(self._fault)]
        elif not self._over.done():
            self._take_all(self._reader.feed, data)

    def lines(self, lines: Sequence[StreamLine]) -> None:
        if not self._over.done():
            self._take_all(iter, lines)

    def ended(self, error: Exception | None) -> None:
        if self._over.done():
            return
        never_asked = isinstance(error, (ConnectionRefusedError, TimeoutError))
        self.engine_ended = self._status in (0, OK) and not never_asked
        text = fault_message(self._fault)
        if self._status in REQUEST_FAULTS and not KNOWN_ID.search(text):
            self._over.set_result(BadRequest(f"{self.live.entry.id} refuses the turn: {text}"))
        elif self._status not in (0, OK):
            if self._status == NO_IMAGE and self.images is not None:
                self.images.forget(self.live.entry.url)
            end = End.REFUSED if self._status in (UNAVAILABLE, NO_IMAGE) else End.BROKEN
            self._over.set_result((end, f"HTTP {self._status}"))
        elif isinstance(error, ATTEMPT_FAILURES):
            self._over.set_result(_broken(error))
        elif error is not None:
            self._over.set_result(fresh(error))
        else:
            self._over.set_result((End.BROKEN, "the stream ended without a finish reason"))

    # ----

    async def _traced(self, upstream: Upstream) -> Ending:
        """Stream the answer inside a trace span of its own, if the turn is traced; return the
        attempt's end and reason.
        """
        parent = self.turn.request.origin.trace
        if parent is None and self.spans is NO_SPANS:
            return await self._stream(upstream, b"")
        said: Attributes = {"rose.replica": self.live.entry.id, "rose.attempt": self._asked.number}
        span = self.spans.begin("rose attempt", parent, said)
        head, how = span.context.head() if span.context else b"", ""
        try:
            end, reason = await self._stream(upstream, head)
            how = "" if end is End.FINISHED else f"{end.value}: {reason}"
        except BaseException as error:
            how = repr(error)
            raise
        finally:
            span.end({}, how)
        return end, reason

    async def _stream(self, upstream: Upstream, more_head: bytes) -> Ending:
        entry = self.live.entry
        link = LINKS[entry.api]
        body = link.encode(self.turn.request, self._asked)
        if images := self.turn.request.images:
            assert self.images is not None
            # Elsewhere they would have to be sent as well.
            may_move, self.live.may_move = self.live.may_move, False
            code, fault = await self.images.send(entry.url, images)
            self.live.may_move = may_move
            self.dispatcher.heard(self.live)
            if code != OK:
                self.status(code)
                self.body(fault)
                self.ended(None)
                return await self._ending()
        url = entry.url + link.path
        connection: BatchedTurn | UpstreamConnection
        if self._goes_with_others(more_head):
            assert self.batches is not None
            connection = self.batches.join(entry.url, link.path, body, self)
        else:
            connection = await upstream.post(url, body, self, more_head)
        rest_s = 0.0
        try:
            ending = await self._ending()
            # A few bytes end the answer, and the connection can be reused. The engine does not know
            # of a stop
            # string: hanging up ends its work.
            hung_up = ending[0] is End.BROKEN or self.turn.matched is not None
            rest_s = 0.0 if hung_up else REST_OF_ANSWER_S
            return ending
        finally:
            self._over.cancel()
            connection.leave(self, rest_s)

    async def _ending(self) -> Ending:
        ending = await self._over
        if isinstance(ending, Exception):
            raise fresh(ending)
        return ending

    def _goes_with_others(self, more_head: bytes) -> bool:
        """Return True if the turn is sent in one request with other turns that begin in the same
        step of the event loop.

        A turn with a trace header needs a request of its own.
        """
        entry = self.live.entry
        suits = self.turn.request.batch and not more_head and LINKS[entry.api].batches
        return suits and self.batches is not None and self.batches.most > 1

    def _take_all(self, read: Callable[[T], Iterable[StreamLine]], data: T) -> None:
        """Process the lines of the bytes that just came, end the attempt on an error, and wake the
        turn's readers.
        """
        try:
            for line in read(data):
                if self._take(line):
                    break
        except ATTEMPT_FAILURES as error:
            self._over.set_result(_broken(error))
        except BadRequest as error:
            known = KNOWN_ID.search(str(error))
            refusal = BadRequest(f"{self.live.entry.id} {error}", error.param)
            self._over.set_result((End.BROKEN, str(error)) if known else refusal)
        self.turn.feed.tell()

    def _take(self, line: StreamLine) -> bool:
        """Process one line of the answer; return True if it ends the attempt.

        Raises BackendError, and changes nothing, for output that no replica can have sampled.
        """
        if line.token_ids:
            if not self.live.need.accepts(line.version):
                self._over.set_result((End.BROKEN, f"tokens of version {line.version}"))
                return True
            self._journal(line)
            if self.turn.matched is not None:
                return self._finish("stop")
        else:
            self._note_prompt(line)
        if line.finish_reason is None:
            return False
        end = ENDS.get(line.finish_reason, End.BROKEN)
        if end is End.FINISHED:
            return self._finish(line.finish_reason)
        self.engine_ended = end is End.BROKEN
        self._over.set_result((end, line.message or line.finish_reason))
        return True

    def _note_prompt(self, line: StreamLine) -> None:
        """Record what a line without tokens reports of the prompt. Raises BackendError."""
        if line.prompt_token_ids is not None:
            self._expanded += line.prompt_token_ids
            if not self.turn.request.images or len(self._expanded) > MOST_PROMPT_TOKENS:
                raise BackendError("a prompt came that was not asked for")
            return
        self._expand()
        if line.prompt_logprobs is not None:
            self._note_logprobs(line.prompt_logprobs)
        elif line.routed_experts is not None:
            self._lead += line.routed_experts.data
            if len(self._lead) > self.turn.journal.prompt_tokens * line.routed_experts.row_bytes:
                raise BackendError("experts of more positions than the prompt has")

    def _expand(self) -> None:
        if self._expanded:
            self.dispatcher.heard(self.live)
            self.turn.expand(self._expanded)
            self._expanded = []

    def _note_logprobs(self, places: PromptLogprobs) -> None:
        """Add logprobs of the prompt to the turn's; those of an earlier attempt, of another
        version, are dropped first.
        """
        feed = self.turn.feed
        if not self._prompt_seen:
            self._prompt_seen = True
            feed.prompt_logprobs = []
        assert feed.prompt_logprobs is not None
        if len(feed.prompt_logprobs) + len(places) > feed.prompt_tokens:
            raise BackendError("logprobs of more tokens than the prompt has")
        feed.prompt_logprobs += places

    def _journal(self, line: StreamLine) -> None:
        """Append a line's tokens to the journal, up to and including the token that completes a
        stop string.
        """
        self._expand()
        journal, text = self.turn.journal, self.turn.text
        most = self.turn.request.sampling.logprobs
        check_line(line, journal.remaining, most)
        tokens, logprobs = line.token_ids, line.logprobs
        if text is not None:
            kept = text.add(tokens, line.finish_reason == "stop")
            if kept < len(tokens):
                tokens, logprobs = tokens[:kept], logprobs[:kept]
        columns: dict[str, bytes] | None = None
        start = self.turn.request.sampling.routed_experts_prompt_start
        if most or start is not None:
            columns = {}
            if line.top_logprobs is not None:
                columns[TOP_LOGPROBS] = line.top_logprobs[: len(tokens) * top_row_bytes(most)]
            if start is not None:
                columns[ROUTED_EXPERTS] = self._routes(line, len(tokens), start)
        journal.append(
            self._asked.number, tokens, logprobs, line.version, line.oldest_version, columns
        )
        self.dispatcher.journaled(self.live, len(tokens))

    def _routes(self, line: StreamLine, kept: int, start: int) -> bytes:
        """Return the experts of the positions before a line's first `kept` tokens, and before the
        turn's first token also those of the prompt from `start` on.

        Each position comes once: elsewhere a turn goes on with its last token's. Raises
        BackendError for any other number of them, BadRequest if there are none.
        """
        routes, feed, journal = line.routed_experts, self.turn.feed, self.turn.journal
        if routes is None:
            raise BadRequest("routed_experts: it gives none", "routed_experts")
        shape = structs.replace(routes, data=b"")
        if feed.routes is None:
            feed.routes = shape
        size, lead = routes.row_bytes, self._lead
        before = 0 if journal.generated else journal.prompt_tokens - 1 - start
        sizes = (len(lead), len(routes.data))
        if shape != feed.routes or sizes != (before * size, len(line.token_ids) * size):
            raise BackendError(f"experts of {sizes} bytes in {shape}, which are not the turn's")
        found = bytes(lead) + routes.data[: kept * size]
        lead.clear()
        return found

    def _finish(self, reason: str) -> bool:
        """Deliver the whole turn, free its place on the replica and return True.

        From here on nothing may interrupt the turn.
        """
        self.live.task = None
        self._end(End.FINISHED, reason)
        self.dispatcher.finish(self.live, End.FINISHED)
        self._over.set_result((End.FINISHED, reason))
        return True

    def _end(self, end: End, reason: str) -> None:
        """End the attempt in the journal, once; a whole turn is delivered to readers at once."""
        self.outcome = self.turn.journal.end(self._asked.number, end, reason)
        if isinstance(self.outcome, Deliver):
            self.dispatcher.stats.turns += self.turn.deliver()


def check_line(line: StreamLine, budget: int, most: int = 0) -> None:
    """Raise BackendError for a line with more tokens than the turn has left, or with logprobs or
    versions that do not match them; BadRequest for one without the `most` most likely tokens.
    """
    count, oldest = len(line.token_ids), line.oldest_version
    if count > budget:
        raise BackendError(f"{count} tokens came where {budget} were left")
    if count != len(line.logprobs):
        raise BackendError(f"{count} tokens came with {len(line.logprobs)} logprobs")
    if most and line.top_logprobs is None:
        raise BadRequest("logprobs: it gives those of sampled tokens alone", "logprobs")
    if most and len(line.top_logprobs or b"") != count * top_row_bytes(most):
        raise BackendError(f"{count} tokens came without {most} logprobs each")
    if oldest is not None and not 0 <= oldest <= line.version:
        raise BackendError(f"tokens of version {line.version} on KV of version {oldest}")


def _broken(error: BaseException) -> Ending:
    """Return End.BROKEN and the error in words, for one of `ATTEMPT_FAILURES`."""
    return End.BROKEN, f"{type(error).__name__}: {error}"

"""Attempt: one replica's answer to a turn, from its bytes to the turn's journal and token stream.

Everything happens in the step of the event loop in which the bytes came: decoded, cut where text
stops, journaled, handed to readers. Only the attempt's ending is awaited.
"""

import asyncio
import re

import msgspec

from elastic_scheduler import Attempt, Deliver, End, JournalError, Outcome
from rose.gateway.backends import BackendError, ReplicaLine
from rose.gateway.backends.base import Reader
from rose.gateway.backends.http_pool import OK
from rose.gateway.errors import BadRequest, fresh
from rose.gateway.replicas.dispatcher import Dispatcher, LiveAttempt
from rose.gateway.stats import GatewayStats
from rose.gateway.turns.hedging import TurnCopy
from rose.gateway.turns.request import TurnRequest
from rose.gateway.turns.token_stream import TokenStream


class AttemptWriter:
    """One attempt at one copy of a turn."""

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

    def tell(self) -> None:
        """Readers may have what was taken."""
        self._feed.tell()

    def take(self, line: ReplicaLine) -> int:
        """Journal a line's tokens, up to a stop string; how many.

        Raises LinkError, having taken nothing, for what no replica can have sampled.
        """
        check_line(line, self._journal.remaining)
        tokens, logprobs = line.token_ids, line.logprobs
        if self._feed.text is not None:
            kept = self._feed.text.add(tokens)
            if kept < len(tokens):
                tokens, logprobs = tokens[:kept], logprobs[:kept]
        stamp = (line.version, line.oldest_version)
        self._journal.append(self.attempt.number, tokens, logprobs, *stamp)
        self._feed.add(tokens, logprobs, *stamp)
        return len(tokens)


def check_line(line: ReplicaLine, budget: int) -> None:
    """Raise LinkError for a line whose parts do not go together."""
    count, oldest = len(line.token_ids), line.oldest_version
    if count > budget:
        raise BackendError(f"{count} tokens came where {budget} were left")
    if count != len(line.logprobs):
        raise BackendError(f"{count} tokens came with {len(line.logprobs)} logprobs")
    if oldest is not None and not 0 <= oldest <= line.version:
        raise BackendError(f"tokens of version {line.version} on KV of version {oldest}")


def _stop_reason(request: TurnRequest, feed: TokenStream, turn: Deliver) -> int | str | None:
    """As vLLM has it: the stop string or stop token that ended the turn, None for anything else."""
    if turn.finish_reason != "stop":
        return None
    if feed.text is not None and feed.text.matched is not None:
        return feed.text.matched
    last = turn.token_ids[-1] if turn.token_ids else None
    return last if last in (request.sampling.stop_token_ids or ()) else None


# What a replica says about the request itself: another replica would say the same.
REQUEST_FAULTS = frozenset({400, 404, 413, 422})
UNAVAILABLE = 503
MAX_FAULT_BYTES = 2_048
# An engine that still knows the attempt's id, which is the gateway's: never the caller's fault.
KNOWN_ID = re.compile("duplicate request id|already running", re.IGNORECASE)
ENDS = {"stop": End.FINISHED, "length": End.FINISHED, "revoked": End.REVOKED, "abort": End.REVOKED}
# All that a replica can do wrong within one attempt.
ATTEMPT_FAILURES = (
    OSError,
    OverflowError,
    RecursionError,
    UnicodeError,
    msgspec.MsgspecError,
    JournalError,
    BackendError,
)
# How an attempt ended and, in words, why.
Ending = tuple[End, str]


def broken(error: BaseException) -> Ending:
    """The end of an attempt by one of `ATTEMPT_FAILURES`."""
    return End.BROKEN, f"{type(error).__name__}: {error}"


class AttemptReceiver:
    """Receives one answer, whose ending is awaited."""

    def __init__(
        self, reader: Reader, live: LiveAttempt, sink: AttemptWriter, dispatcher: Dispatcher
    ) -> None:
        self._reader = reader
        self._live = live
        self._sink = sink
        self._dispatcher = dispatcher
        self._status = 0
        self._fault = b""
        # Never an error to be raised from here: its frames would hold this exchange, and it them.
        self._over: asyncio.Future[Ending | Exception] = asyncio.get_running_loop().create_future()

    async def ending(self) -> Ending:
        """Return when the attempt is over.

        Raises BadRequest for what no other replica would do either, or what is wrong in here.
        """
        ending = await self._over
        if isinstance(ending, Exception):
            raise fresh(ending)
        return ending

    def cancel(self) -> None:
        """Take nothing more of the answer."""
        self._over.cancel()

    def status(self, code: int) -> None:
        self._status = code

    def body(self, data: bytes) -> None:
        if self._status != OK:
            self._fault += data[: MAX_FAULT_BYTES - len(self._fault)]
        elif not self._over.done():
            try:
                for line in self._reader.feed(data):
                    if self._take(line):
                        return
                self._sink.tell()
            except ATTEMPT_FAILURES as error:
                self._over.set_result(broken(error))

    def ended(self, error: Exception | None) -> None:
        if self._over.done():
            return
        text = self._fault.decode("utf-8", "replace")
        if self._status in REQUEST_FAULTS and not KNOWN_ID.search(text):
            self._over.set_result(BadRequest(f"{self._live.entry.id} refuses the turn: {text}"))
        elif self._status not in (0, OK):
            end = End.REFUSED if self._status == UNAVAILABLE else End.BROKEN
            self._over.set_result((end, f"HTTP {self._status}"))
        elif isinstance(error, ATTEMPT_FAILURES):
            self._over.set_result(broken(error))
        elif error is not None:
            self._over.set_result(fresh(error))
        else:
            self._over.set_result((End.BROKEN, "the stream ended without a finish reason"))

    def _take(self, line: ReplicaLine) -> bool:
        """One line of the answer; whether it was the last one that counts."""
        live, sink = self._live, self._sink
        if line.token_ids:
            if not live.need.accepts(line.version):
                self._over.set_result((End.BROKEN, f"tokens of version {line.version}"))
                return True
            self._dispatcher.journaled(live, sink.take(line))
            if sink.stopped:
                return self._finish("stop")
        if line.finish_reason is None:
            return False
        end = ENDS.get(line.finish_reason, End.BROKEN)
        if end is End.FINISHED:
            return self._finish(line.finish_reason)
        self._over.set_result((end, line.message or line.finish_reason))
        return True

    def _finish(self, reason: str) -> bool:
        """The turn is complete: hand it over and free its place before anything else.

        From here on nothing may interrupt it.
        """
        self._live.task = None
        self._sink.end(End.FINISHED, reason)
        self._dispatcher.finish(self._live, End.FINISHED)
        self._over.set_result((End.FINISHED, reason))
        return True

"""One attempt's answer, from a replica's bytes to the turn's journal and feed.

Everything happens in the step of the event loop in which the bytes came: decoded, journaled, handed
to readers. Only how it ended is awaited.
"""

import asyncio
import re

import msgspec

from elastic_scheduler import End, JournalError
from rose.gateway.dispatcher import Dispatcher, LiveAttempt
from rose.gateway.errors import BadRequest, fresh
from rose.gateway.links import LinkError, ReplicaLine
from rose.gateway.links.base import Reader
from rose.gateway.sink import AttemptSink
from rose.gateway.upstream import OK

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
    LinkError,
)
# How an attempt ended and, in words, why.
Ending = tuple[End, str]


def broken(error: BaseException) -> Ending:
    """The end of an attempt by one of `ATTEMPT_FAILURES`."""
    return End.BROKEN, f"{type(error).__name__}: {error}"


class Exchange:
    """Receives one answer, whose ending is awaited."""

    def __init__(
        self, reader: Reader, live: LiveAttempt, sink: AttemptSink, dispatcher: Dispatcher
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
        """Part of `Receiver`."""
        self._status = code

    def body(self, data: bytes) -> None:
        """Part of `Receiver`."""
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
        """Part of `Receiver`."""
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

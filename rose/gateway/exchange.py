"""One attempt's answer, from a replica's bytes to the turn's journal and feed.

Everything happens in the step of the event loop in which the bytes came: decoded, journaled, handed
to readers. Only how it ended is awaited.
"""

import asyncio

import msgspec

from elastic_scheduler import End, JournalError
from rose.gateway.dispatcher import Dispatcher, LiveAttempt
from rose.gateway.errors import BadRequest
from rose.gateway.links import LinkError, ReplicaLine
from rose.gateway.links.base import Reader
from rose.gateway.sink import AttemptSink
from rose.gateway.upstream import OK

# What a replica says about the request itself: another replica would say the same.
REQUEST_FAULTS = frozenset({400, 404, 413, 422})
UNAVAILABLE = 503
MAX_FAULT_BYTES = 2_048
ENDS = {"stop": End.FINISHED, "length": End.FINISHED, "revoked": End.REVOKED, "abort": End.REVOKED}
# All that a replica can do wrong within one attempt.
ATTEMPT_FAILURES = (OSError, OverflowError, msgspec.MsgspecError, JournalError, LinkError)


class Exchange:
    """Receives one answer. `over` is how the attempt ended and, in words, why.

    It raises one of `ATTEMPT_FAILURES`, or BadRequest for what no other replica would do either.
    """

    def __init__(
        self, reader: Reader, live: LiveAttempt, sink: AttemptSink, dispatcher: Dispatcher
    ) -> None:
        self._reader = reader
        self._live = live
        self._sink = sink
        self._dispatcher = dispatcher
        self._status = 0
        self._fault = b""
        self.over: asyncio.Future[tuple[End, str]] = asyncio.get_running_loop().create_future()

    def status(self, code: int) -> None:
        """Part of `Receiver`."""
        self._status = code

    def body(self, data: bytes) -> None:
        """Part of `Receiver`."""
        if self._status != OK:
            self._fault += data[: MAX_FAULT_BYTES - len(self._fault)]
        elif not self.over.done():
            try:
                for line in self._reader.feed(data):
                    if self._take(line):
                        return
                self._sink.tell()
            except ATTEMPT_FAILURES as error:
                self.over.set_exception(error)

    def ended(self, error: Exception | None) -> None:
        """Part of `Receiver`."""
        if self.over.done():
            return
        if self._status in REQUEST_FAULTS:
            text = self._fault.decode("utf-8", "replace")
            self.over.set_exception(BadRequest(f"{self._live.entry.id} refuses the turn: {text}"))
        elif self._status not in (0, OK):
            end = End.REFUSED if self._status == UNAVAILABLE else End.BROKEN
            self.over.set_result((end, f"HTTP {self._status}"))
        elif error is not None:
            self.over.set_exception(error)
        else:
            self.over.set_result((End.BROKEN, "the stream ended without a finish reason"))

    def _take(self, line: ReplicaLine) -> bool:
        """One line of the answer; whether it was the last one that counts."""
        live, sink = self._live, self._sink
        if line.token_ids:
            if not live.need.accepts(line.version):
                self.over.set_result((End.BROKEN, f"tokens of version {line.version}"))
                return True
            self._dispatcher.journaled(live, sink.take(line))
            if sink.stopped:
                return self._finish("stop")
        if line.finish_reason is None:
            return False
        end = ENDS.get(line.finish_reason, End.BROKEN)
        if end is End.FINISHED:
            return self._finish(line.finish_reason)
        self.over.set_result((end, line.message or line.finish_reason))
        return True

    def _finish(self, reason: str) -> bool:
        """The turn is complete: hand it over and free its place before anything else.

        From here on nothing may interrupt it.
        """
        self._live.task = None
        self._sink.end(End.FINISHED, reason)
        self._dispatcher.finish(self._live, End.FINISHED)
        self.over.set_result((End.FINISHED, reason))
        return True

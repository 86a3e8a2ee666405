"""Batches: turns that begin at one moment on one replica go in one request.

    join* ── end of this step of the event loop ──► one `BatchBody` ── lines ──► receivers of turns
                                                      │ some of them leave: `LeaveBody`
                                                      │ all have left: the connection is closed
                                                      └─ it breaks: all receivers get the error

A turn of a batch looks to its receiver like one alone: its own status, its own lines, its own end;
its next attempt, on another replica for example, is that turn's own. If a replica refuses a batch
as a request, because of one turn for example, its turns are requested one by one.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from rose.contract.replica import (
    GENERATE_BATCH,
    LEAVE_BATCH,
    MAX_BATCH_TURNS,
    MAX_LINE_BYTES,
    BatchLine,
    LeaveBody,
    StreamLine,
)
from rose.gateway.backends.http_pool import (
    NOBODY,
    OK,
    ResponseReceiver,
    Upstream,
    UpstreamConnection,
)
from rose.gateway.backends.replica_apis import BackendError, Lines
from rose.gateway.errors import fresh

# A longer request would block the replica's event loop while it is read.
MAX_BATCH_BYTES: Final = 1 << 20
MAX_FAULT_BYTES: Final = 2_048
REST_OF_ANSWER_S: Final = 1.0
REQUEST_FAULTS: Final = frozenset({400, 404, 405, 413, 422})
# Time limit of the answer to a leave.
LEAVE_S: Final = 5.0
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BatchLine).decode
_BROKEN_LINES = (BackendError, msgspec.MsgspecError, UnicodeError, RecursionError)


class TurnReceiver(ResponseReceiver, Protocol):
    """Interface of the receiver of one turn's answer: of its bytes if it is requested alone, of its
    lines in a batch.
    """

    def lines(self, lines: Sequence[StreamLine]) -> None:
        """Process the next lines of the turn's answer, decoded from the batch's."""
        ...


class BatchedTurn:
    """Handle of one turn that is requested in a batch, used like a connection; call `leave` in the
    end.
    """

    __slots__ = ("_alone", "_batch", "body", "over", "path", "place", "receiver")

    def __init__(self, batch: "_Batch", path: str, body: bytes, receiver: TurnReceiver) -> None:
        self._batch = batch
        self._alone: UpstreamConnection | None = None
        self.path = path
        self.body = body
        self.receiver: TurnReceiver | None = receiver
        self.place = 0
        # True if no more lines of the turn will come.
        self.over = False

    def leave(self, receiver: TurnReceiver, rest_s: float = 0.0) -> None:
        """Stop delivering to the receiver, and cancel the turn at the replica if it runs."""
        self.receiver = None
        alone, self._alone = self._alone, None
        if alone is not None:
            alone.leave(receiver, rest_s)
        elif not self.over:
            self.over = True
            self._batch.left(self)

    def give(self, lines: Sequence[StreamLine]) -> None:
        """Pass lines of this turn to its receiver; a line with a finish reason marks the turn as
        over.
        """
        if self.receiver is None:
            return
        receiver = self.receiver
        if lines[-1].finish_reason is not None:
            self.over = True
        receiver.lines(lines)

    def end(self, error: Exception | None, status: int = OK, fault: bytes = b"") -> None:
        """End the turn without a last line: pass the error of the connection, or the HTTP status
        and body of a refusal, to its receiver.
        """
        receiver, self.receiver, self.over = self.receiver, None, True
        if receiver is None:
            return
        if status != OK:
            receiver.status(status)
            receiver.body(fault)
        receiver.ended(error)

    async def ask_alone(self, upstream: Upstream, url: str) -> None:
        """Send this turn in a request of its own, if its receiver has not left it."""
        receiver = self.receiver
        if receiver is None:
            return
        try:
            alone = await upstream.post(url + self.path, self.body, receiver)
        except OSError as error:
            self.end(error)
            return
        if self.receiver is None:
            alone.leave(receiver)
        else:
            self._alone = alone


class BatchCollector:
    """Collector that joins turns for one replica, which begin in the same step of the event loop,
    into one request of at most `most` turns.
    """

    def __init__(self, upstream: Upstream, most: int) -> None:
        self._upstream = upstream
        self.most = min(most, MAX_BATCH_TURNS)
        self._gathering: dict[str, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, url: str, path: str, body: bytes, receiver: TurnReceiver) -> BatchedTurn:
        """Add a turn to the batch for the replica at `url` and return its handle; the batch is sent
        at the end of this step.

        path: route at which the turn would be requested alone. receiver: is told everything, also
        that the connection failed.
        """
        batch = self._gathering.get(url)
        if batch is None or not batch.takes(body, self.most):
            batch = self._gathering[url] = _Batch(self, self._upstream, url)
            asyncio.get_running_loop().call_soon(self._send, batch)
        return batch.add(BatchedTurn(batch, path, body, receiver))

    def run(self, work: "asyncio.Task[None]") -> None:
        """Keep a reference to a task until it is done, so that it is not garbage collected."""
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)

    def _send(self, batch: "_Batch") -> None:
        if self._gathering.get(batch.url) is batch:
            del self._gathering[batch.url]
        self.run(asyncio.ensure_future(batch.send()))


class _Batch:
    """One request with several turns, and the receiver of its answer."""

    def __init__(self, batches: BatchCollector, upstream: Upstream, url: str) -> None:
        self._batches = batches
        self._upstream = upstream
        self._seats: list[BatchedTurn] = []
        self._bytes = 0
        self._name = secrets.token_hex(16)
        self._connection: UpstreamConnection | None = None
        self._reader = Lines(MAX_LINE_BYTES)
        self._status = 0
        self._fault = b""
        self._leaving: list[int] = []
        # True if the replica may still work for a turn that was cancelled.
        self._left_early = False
        self.url = url

    def takes(self, body: bytes, most: int) -> bool:
        """Return True if the batch has room for one more turn with this body."""
        return len(self._seats) < most and self._bytes + len(body) <= MAX_BATCH_BYTES

    def add(self, seat: BatchedTurn) -> BatchedTurn:
        self._seats.append(seat)
        self._bytes += len(seat.body)
        return seat

    def left(self, seat: BatchedTurn) -> None:
        """Tell the replica, at the end of this step, that a turn is cancelled."""
        self._left_early = True
        if self._connection is None:
            return
        if not self._leaving:
            # Others may leave in this step.
            asyncio.get_running_loop().call_soon(self._let_go)
        self._leaving.append(seat.place)

    async def send(self) -> None:
        """Send one request with all turns still wanted, or a plain request if only one is."""
        self._seats = [seat for seat in self._seats if not seat.over]
        if len(self._seats) < 2:
            await self._ask_alone()
            return
        for place, seat in enumerate(self._seats):
            seat.place = place
        turns = b",".join([seat.body for seat in self._seats])
        body = b'{"batch":"%b","turns":[%b]}' % (self._name.encode(), turns)
        try:
            connection = await self._upstream.post(self.url + GENERATE_BATCH, body, self)
        except OSError as error:
            self._end(error)
            return
        self._connection = connection
        for seat in self._seats:
            if seat.over:
                self.left(seat)

    # ---- `ResponseReceiver` ----

    def status(self, code: int) -> None:
        self._status = code
        if code == OK:
            for seat in self._seats:
                if seat.receiver is not None:
                    seat.receiver.status(code)

    def body(self, data: bytes) -> None:
        if self._status != OK:
            self._fault += data[: MAX_FAULT_BYTES - len(self._fault)]
            return
        try:
            found = [_decode(line) for line in self._reader.split(data) if line]
            self._give(found)
        except _BROKEN_LINES as error:
            # A lost line may be any turn's, so all turns end.
            self._hang_up()
            self._end(BackendError(f"{type(error).__name__}: {error}"))

    def ended(self, error: Exception | None) -> None:
        self._connection = None
        if self._status in REQUEST_FAULTS:
            self._batches.run(asyncio.ensure_future(self._ask_alone()))
        else:
            self._end(error)

    # ----

    def _give(self, found: Sequence[BatchLine]) -> None:
        """Pass lines to their turns, all lines of one turn at once. Raises BackendError for a line
        of an unknown turn.
        """
        lines: dict[int, list[StreamLine]] = {}
        for each in found:
            if each.turn >= len(self._seats):
                raise BackendError(f"a line of turn {each.turn} of {len(self._seats)}")
            if each.status:
                said = (each.line.message or "").encode()
                self._seats[each.turn].end(None, each.status, said)
            else:
                lines.setdefault(each.turn, []).append(each.line)
        for place, of_turn in lines.items():
            self._seats[place].give(of_turn)
        if not self._left_early and all(seat.over for seat in self._seats):
            # A few bytes end the answer, and the connection can be reused.
            self._hang_up(REST_OF_ANSWER_S)
            self._seats = []

    def _end(self, error: Exception | None) -> None:
        """End every turn of the batch that is not over, with this error or the HTTP status that
        refused the batch.
        """
        status = self._status or OK
        seats, self._seats = self._seats, []
        for seat in seats:
            # Each turn gets its own error: a raised error references the frames of its turn.
            seat.end(None if error is None else fresh(error), status, self._fault)

    async def _ask_alone(self) -> None:
        seats, self._seats = self._seats, []
        await asyncio.gather(*[seat.ask_alone(self._upstream, self.url) for seat in seats])

    def _let_go(self) -> None:
        """Close the connection if the last turn was cancelled, else send the replica the list of
        cancelled turns.
        """
        if self._connection is None:
            return
        if all(seat.over for seat in self._seats):
            self._hang_up()
            self._seats = []
            return
        body = _encode(LeaveBody(self._name, self._leaving))
        self._leaving = []
        self._batches.run(asyncio.ensure_future(self._say_left(body)))

    async def _say_left(self, body: bytes) -> None:
        try:
            said = await self._upstream.post(self.url + LEAVE_BATCH, body, NOBODY)
            said.leave(NOBODY, LEAVE_S)
        except OSError:
            # The turns run on to their ends, or the replica is gone.
            return

    def _hang_up(self, rest_s: float = 0.0) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave(self, rest_s)

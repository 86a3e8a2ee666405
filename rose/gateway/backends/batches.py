"""Turns that begin at one moment on one replica are asked for in one request.

    join* ── end of this step of the event loop ──► one `BatchBody` ── lines ──► receivers of turns
                                                      │ some of them leave: `LeaveBody`
                                                      │ all have left: the connection is closed
                                                      └─ it breaks: all receivers hear of it

To its receiver a turn of a batch is what it would be alone: its own status, its own lines, its own
end; what follows of it, another replica for one, is that turn's business. A replica that refuses a
batch as a request, since it is older or since one turn spoils it, is asked turn by turn.
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
from rose.gateway.backends.base import BackendError, Lines
from rose.gateway.backends.http_pool import (
    NOBODY,
    OK,
    ResponseReceiver,
    Upstream,
    UpstreamConnection,
)
from rose.gateway.errors import fresh

# More in one request would hold up the replica's event loop for long as it is read.
MAX_BATCH_BYTES: Final = 1 << 20
MAX_FAULT_BYTES: Final = 2_048
REST_OF_ANSWER_S: Final = 1.0
# So long a replica that knew no batches is not asked for any: a newer one may be there by then.
ALONE_S: Final = 60.0
MOST_ALONE: Final = 4_096
REQUEST_FAULTS: Final = frozenset({400, 404, 405, 413, 422})
NOT_FOUND: Final = frozenset({404, 405})
# So long the answer to a leave is waited for.
LEAVE_S: Final = 5.0
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(BatchLine).decode
_BROKEN_LINES = (BackendError, msgspec.MsgspecError, UnicodeError, RecursionError)


class TurnReceiver(ResponseReceiver, Protocol):
    """Receiver of one turn: of the bytes of its own answer, or of its lines in a batch's."""

    def lines(self, lines: Sequence[StreamLine]) -> None:
        """More lines came."""
        ...


class Seat:
    """One turn's place in a batch; `leave` it in the end, as a connection."""

    __slots__ = ("_alone", "_batch", "body", "over", "path", "place", "receiver")

    def __init__(self, batch: "_Batch", path: str, body: bytes, receiver: TurnReceiver) -> None:
        self._batch = batch
        self._alone: UpstreamConnection | None = None
        self.path = path
        self.body = body
        self.receiver: TurnReceiver | None = receiver
        self.place = 0
        # Nothing more is to come of it.
        self.over = False

    def leave(self, receiver: TurnReceiver, rest_s: float = 0.0) -> None:
        """The turn's receiver wants no more of it."""
        self.receiver = None
        alone, self._alone = self._alone, None
        if alone is not None:
            alone.leave(receiver, rest_s)
        elif not self.over:
            self.over = True
            self._batch.left(self)

    def give(self, lines: Sequence[StreamLine]) -> None:
        """Lines of this turn; its last one says how it ends."""
        if self.receiver is None:
            return
        receiver = self.receiver
        if lines[-1].finish_reason is not None:
            self.over = True
        receiver.lines(lines)

    def end(self, error: Exception | None, status: int = OK, fault: bytes = b"") -> None:
        """Nothing more comes: it broke off, or was refused."""
        receiver, self.receiver, self.over = self.receiver, None, True
        if receiver is None:
            return
        if status != OK:
            receiver.status(status)
            receiver.body(fault)
        receiver.ended(error)

    async def ask_alone(self, upstream: Upstream, url: str) -> None:
        """Ask for this turn in a request of its own."""
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


class TurnBatches:
    """Gathers turns by their replica's URL; a batch has at most `most` of them."""

    def __init__(self, upstream: Upstream, most: int) -> None:
        self._upstream = upstream
        self._most = min(most, MAX_BATCH_TURNS)
        self._gathering: dict[str, _Batch] = {}
        self._alone_until_s: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def takes(self, url: str) -> bool:
        """Whether turns may be asked of this replica in batches."""
        if self._most < 2:
            return False
        until_s = self._alone_until_s.get(url)
        if until_s is None:
            return True
        if asyncio.get_running_loop().time() < until_s:
            return False
        del self._alone_until_s[url]
        return True

    def join(self, url: str, path: str, body: bytes, receiver: TurnReceiver) -> Seat:
        """Have a turn asked for, as a request of its own would ask at `path`; it cannot fail here.

        receiver: hears of everything, a connection that there is not for one.
        """
        batch = self._gathering.get(url)
        if batch is None or not batch.takes(body, self._most):
            batch = self._gathering[url] = _Batch(self, self._upstream, url)
            asyncio.get_running_loop().call_soon(self._send, batch)
        return batch.add(Seat(batch, path, body, receiver))

    def run(self, work: "asyncio.Task[None]") -> None:
        """Keep a task until it is over."""
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)

    def alone(self, url: str) -> None:
        """A replica knows no batches."""
        if len(self._alone_until_s) >= MOST_ALONE:
            self._alone_until_s.clear()
        self._alone_until_s[url] = asyncio.get_running_loop().time() + ALONE_S

    def _send(self, batch: "_Batch") -> None:
        if self._gathering.get(batch.url) is batch:
            del self._gathering[batch.url]
        self.run(asyncio.ensure_future(batch.send()))


class _Batch:
    """One request of several turns, and the receiver of its answer."""

    def __init__(self, batches: TurnBatches, upstream: Upstream, url: str) -> None:
        self._batches = batches
        self._upstream = upstream
        self._seats: list[Seat] = []
        self._bytes = 0
        self._name = secrets.token_hex(16)
        self._connection: UpstreamConnection | None = None
        self._reader = Lines(MAX_LINE_BYTES)
        self._status = 0
        self._fault = b""
        self._leaving: list[int] = []
        # The replica may still be at work for a turn that nobody wants.
        self._left_early = False
        self.url = url

    def takes(self, body: bytes, most: int) -> bool:
        """Whether there is room for one more."""
        return len(self._seats) < most and self._bytes + len(body) <= MAX_BATCH_BYTES

    def add(self, seat: Seat) -> Seat:
        self._seats.append(seat)
        self._bytes += len(seat.body)
        return seat

    def left(self, seat: Seat) -> None:
        """A turn is not wanted any more, though it has not ended."""
        self._left_early = True
        if self._connection is None:
            return
        if not self._leaving:
            # Others may leave in this step.
            asyncio.get_running_loop().call_soon(self._let_go)
        self._leaving.append(seat.place)

    async def send(self) -> None:
        """Ask for all turns that are still wanted."""
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
            # Of none of them it can be known what is missing.
            self._hang_up()
            self._end(BackendError(f"{type(error).__name__}: {error}"))

    def ended(self, error: Exception | None) -> None:
        self._connection = None
        if self._status in REQUEST_FAULTS:
            if self._status in NOT_FOUND:
                self._batches.alone(self.url)
            self._batches.run(asyncio.ensure_future(self._ask_alone()))
        else:
            self._end(error)

    # ----

    def _give(self, found: Sequence[BatchLine]) -> None:
        """Hand lines to their turns, those of one turn at once."""
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
            # A few bytes end the answer, and the connection can be used again.
            self._hang_up(REST_OF_ANSWER_S)
            self._seats = []

    def _end(self, error: Exception | None) -> None:
        """Tell every turn that is not over."""
        status = self._status or OK
        seats, self._seats = self._seats, []
        for seat in seats:
            # Each its own: an error that is raised holds the frames of its turn.
            seat.end(None if error is None else fresh(error), status, self._fault)

    async def _ask_alone(self) -> None:
        seats, self._seats = self._seats, []
        await asyncio.gather(*[seat.ask_alone(self._upstream, self.url) for seat in seats])

    def _let_go(self) -> None:
        """Some have left: hang up after the last one, else say so."""
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
            # They run on to their ends, or the replica is gone.
            return

    def _hang_up(self, rest_s: float = 0.0) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave(self, rest_s)

"""Turns of a replica: each from its admission to its last line, over one request in its engine.

opened ── start ──> running ── next_lines ... ──> ended (stop, length, revoked, abort, error)
   └── revoked before it started: the engine's request is aborted as soon as there is one
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from msgspec import structs
from starlette.types import Receive, Send

from rose.contract.replica import GenerateBody, StreamLine
from rose.replica.admission import TurnGate
from rose.replica.asgi import ClientGoneError, refuse, until_gone
from rose.replica.engine import ReplicaEngine, RequestRefusedError, StampedRequest
from rose.replica.token_versions import KvStaleness, UnknownVersionError
from rose.tracing import TraceContext

_encode_lines = msgspec.json.Encoder().encode_lines


@dataclass(slots=True, eq=False)
class ReplicaTurn:
    """State of one turn between its admission and its last line; the stream around it owns the
    connection.
    """

    _engine: ReplicaEngine
    _body: GenerateBody
    _ages: KvStaleness
    _trace: TraceContext | None = None
    _client_gone: bool = False
    _unheard: bool = False
    begun: bool = False
    request: StampedRequest | None = None
    revoked: bool = False
    ended: bool = False

    @property
    def over(self) -> bool:
        """True if the turn need not begin: it was revoked, or its client is gone."""
        return self.revoked or self._client_gone

    @property
    def job(self) -> str:
        """Name of the turn's job, "" if the request names none."""
        return self._body.job

    @property
    def tokens(self) -> int:
        """Number of output tokens so far."""
        return 0 if self.request is None else self.request.tokens

    async def start(self) -> None:
        """Register the turn in the engine; abort it at once if it was revoked meanwhile. Raises
        RequestRefusedError or ClientGoneError.
        """
        if self._client_gone:
            raise ClientGoneError("the client left before its turn began")
        self.begun = True
        self.request = await self._engine.start(self._body, self._ages, self._trace)
        if self._client_gone:
            raise ClientGoneError("the client left before its turn started")
        if self.revoked:
            # By now these may be the weights of another job.
            self._unheard = True
            await self._engine.abort([self.request])

    async def next_lines(self) -> list[StreamLine]:
        """Wait for output and return its lines; the finish reason is in the line of the last tokens
        or in one of its own. An engine failure ends the turn with reason "error".

        Raises ClientGoneError.
        """
        assert self.request is not None
        failures: tuple[type[Exception], ...] = (*self._engine.failures, UnknownVersionError)
        try:
            delta = await self.request.next()
        except failures as error:
            self.ended = True
            await self._engine.abort([self.request])
            said = f"{type(error).__name__}: {error}"
            return [StreamLine(finish_reason="error", message=said)]
        chunks = [] if self._unheard else delta.chunks
        if delta.finish_reason is None:
            return chunks
        self.ended = True
        reason = self._reason(delta.finish_reason)
        if not chunks or reason != "stop":
            return [*chunks, StreamLine(finish_reason=reason)]
        # Put it in the line of its last token: a reader with an end of sequence knows that it is
        # one.
        return [*chunks[:-1], structs.replace(chunks[-1], finish_reason=reason)]

    def leave(self) -> None:
        """Record that the client disconnected or cancelled the turn, and interrupt `next_lines`."""
        if self.ended:
            return
        self._client_gone = True
        if self.request is not None:
            self.request.interrupt(ClientGoneError("the client left its turn"))

    async def close(self) -> None:
        """Abort the turn's request in the engine if it has not ended."""
        if not self.ended and self.request is not None:
            self.ended = True
            await self._engine.abort([self.request])

    def _reason(self, reason: str) -> str:
        return "revoked" if self.revoked and reason == "abort" else reason


class Turns:
    """Open turns of a replica: it opens, streams, counts and revokes them.

    hold: gate that holds back new turns during an update. ages: activations of policy versions.
    """

    def __init__(self, engine: ReplicaEngine) -> None:
        self._engine = engine
        self._live: set[ReplicaTurn] = set()
        self._past_tokens = 0
        self._left = asyncio.Event()
        self.hold = TurnGate()
        self.ages = KvStaleness()

    @property
    def running(self) -> int:
        """Number of open turns that have at least one output token."""
        return sum(turn.tokens > 0 for turn in self._live)

    @property
    def waiting(self) -> int:
        """Number of open turns that have no output token yet."""
        return sum(turn.tokens == 0 for turn in self._live)

    @property
    def tokens_total(self) -> int:
        """Number of output tokens of all turns since the engine started."""
        return self._past_tokens + sum(turn.tokens for turn in self._live)

    def open(self, body: GenerateBody, trace: TraceContext | None = None) -> ReplicaTurn:
        """Return a new turn, which a drain from now on revokes; `serve` or `begin` starts it."""
        turn = ReplicaTurn(self._engine, body, self.ages, trace)
        self._live.add(turn)
        return turn

    async def revoke_all(self) -> int:
        """Abort every open turn, each of which first delivers its tokens so far; return the number
        of turns.
        """
        return await self._revoke(self._live)

    async def revoke_others(self, job: str) -> int:
        """Abort the open turns of other named jobs, because weights of `job` are coming; return the
        number of turns.
        """
        if not job:
            return 0
        return await self._revoke(turn for turn in self._live if turn.job not in ("", job))

    async def _revoke(self, some: Iterable[ReplicaTurn]) -> int:
        turns = [turn for turn in some if not turn.revoked and not turn.ended]
        for turn in turns:
            turn.revoked = True
        self.hold.look_again()
        await self._engine.abort([turn.request for turn in turns if turn.request is not None])
        return len(turns)

    async def all_ended(self, limit_s: float) -> bool:
        """Wait until no started turn is left in the engine and return True; return False after
        `limit_s` seconds.

        Close the hold first, or new turns begin meanwhile.
        """
        try:
            async with asyncio.timeout(limit_s):
                while any(turn.begun and not turn.ended for turn in self._live):
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    async def serve(self, turn: ReplicaTurn, receive: Receive, send: Send) -> None:
        """Run a turn and stream its lines as the HTTP response; the turn is aborted if the client
        disconnects.
        """
        try:
            with self.watched([turn], receive):
                await self.begin(turn)
                await stream(turn.next_lines, lambda: turn.ended, send)
        except RequestRefusedError as error:
            kind = "bad_request" if error.status < 500 else "unavailable"
            await refuse(send, error.status, kind, str(error))
        except ClientGoneError:
            # The client is gone; the rest of the turn is ended below.
            return
        finally:
            await self.close(turn)

    @contextmanager
    def watched(self, turns: Collection[ReplicaTurn], receive: Receive) -> Iterator[None]:
        """Return a context manager that cancels these turns if the client disconnects inside its
        `with` block.
        """

        def gone(watch: "asyncio.Task[None]") -> None:
            if not watch.cancelled():
                self.leave(turns)

        watch = asyncio.create_task(until_gone(receive))
        watch.add_done_callback(gone)
        try:
            yield
        finally:
            watch.cancel()

    async def begin(self, turn: ReplicaTurn) -> None:
        """Wait until no weight update holds back new turns, then start the turn in the engine.

        Raises RequestRefusedError or ClientGoneError.
        """
        await self.hold.passed(lambda: turn.over)
        await turn.start()

    def leave(self, turns: Iterable[ReplicaTurn]) -> None:
        """Record that the client cancelled these turns; their streams then close them."""
        for turn in turns:
            turn.leave()
        self.hold.look_again()

    async def close(self, turn: ReplicaTurn) -> None:
        """Remove a turn from the open ones, add its tokens to the total and abort it in the engine
        if it has not ended.
        """
        self._live.discard(turn)
        self._past_tokens += turn.tokens
        await turn.close()
        self._left.set()


async def stream(
    lines: Callable[[], Awaitable[Sequence[msgspec.Struct]]], over: Callable[[], bool], send: Send
) -> None:
    """Send an NDJSON response: the result of each call of `lines` as one chunk, until `over`
    returns True.

    Headers are sent with the first lines, which saves the gateway one wake-up.
    """
    ready = await lines()
    # A fresh list: the server's middleware adds to its headers in place.
    headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while not over():
        body = _encode_lines(ready)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        ready = await lines()
    await send({"type": "http.response.body", "body": _encode_lines(ready), "more_body": False})

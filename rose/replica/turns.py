"""Turns of a replica: each from its admission to its last line, over one request in its engine.

opened ── start ──> running ── next_lines ... ──> ended (stop, length, revoked, abort, error)
   └── revoked before it started: the engine's request is aborted as soon as there is one
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import structs
from starlette.types import Receive, Send

from rose.contract.replica import PROMPT_IDS, GenerateBody, StreamLine
from rose.images import Image, ImageCache
from rose.replica.admission import TurnGate
from rose.replica.asgi import ClientGoneError, refuse, until_gone
from rose.replica.engine import (
    HeldAdapter,
    ReplicaEngine,
    RequestRefusedError,
    StampedRequest,
)
from rose.replica.token_versions import KvStaleness, UnknownVersionError
from rose.tracing import TraceContext

START_POLL_S: Final = 0.001
# Files of images that are kept for turns that name them.
IMAGES_BYTES: Final = 512 << 20
_encode_lines = msgspec.json.Encoder().encode_lines


@dataclass(slots=True, eq=False)
class ReplicaTurn:
    """State of one turn between its admission and its last line; the stream around it owns the
    connection.
    """

    _engine: ReplicaEngine
    _body: GenerateBody
    _ages: KvStaleness
    _adapter_of: Callable[[str], HeldAdapter | None]
    _trace: TraceContext | None = None
    _images: Sequence[Image] = ()
    _client_gone: bool = False
    _unheard: bool = False
    _moves: bool = False
    # Output tokens of the turn, kept where it may go on under another adapter.
    _made: list[int] = field(default_factory=list)
    _before: int = 0
    adapter: HeldAdapter | None = None
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
        return self._before + (0 if self.request is None else self.request.tokens)

    async def start(self) -> None:
        """Register the turn in the engine; abort it at once if it was revoked meanwhile. Raises
        RequestRefusedError or ClientGoneError.
        """
        if self._client_gone:
            raise ClientGoneError("the client left before its turn began")
        self.begun = True
        request = await self._start(self._body)
        if self._client_gone:
            raise ClientGoneError("the client left before its turn started")
        if self.revoked:
            # By now these may be the weights of another job.
            self._unheard = True
            await self._engine.abort([request])

    async def _start(self, body: GenerateBody) -> StampedRequest:
        self.adapter = self._adapter_of(body.job)
        images = {"images": self._images} if self._images else {}
        request = await self._engine.start(body, self._ages, self._trace, self.adapter, **images)
        self.request = request
        if self._moves:
            await self._engine.abort([request])
        return request

    def move(self) -> bool:
        """Note that the turn is to go on under its job's newest adapter, and return True; return
        False if it cannot, since its output counts.

        The caller then aborts its request.
        """
        self._moves = not self._body.sampling.counts_output
        return self._moves

    async def _go_on(self) -> list[StreamLine]:
        """Start the rest of the turn under its job's newest adapter, all of its KV computed anew;
        return the turn's last line if it cannot be started.
        """
        self._moves = False
        self._before = len(self._made)
        self.request = None
        body, sampling = self._body, self._body.sampling
        tokens = [*body.token_ids, *self._made]
        rest = structs.replace(
            body,
            # The engine may still know the name of the aborted one.
            request_id=f"{body.request_id}+{self._before}",
            token_ids=tokens,
            sampling=sampling.rest(sampling.max_tokens - self._before, len(tokens)),
        )
        try:
            request = await self._start(rest)
        except RequestRefusedError as error:
            self.ended = True
            return [StreamLine(finish_reason="abort", message=str(error))]
        if self._client_gone:
            raise ClientGoneError("the client left its turn")
        if self.revoked:
            await self._engine.abort([request])
        return []

    async def next_lines(self) -> list[StreamLine]:
        """Wait for output and return its lines; the finish reason is in the line of the last tokens
        or in one of its own. An engine failure ends the turn with reason "error".

        Raises ClientGoneError.
        """
        assert self.request is not None
        if prompt := self.request.expanded:
            self.request.expanded = None
            self._body = structs.replace(self._body, token_ids=prompt)
            starts = range(0, len(prompt), PROMPT_IDS)
            return [StreamLine(prompt_token_ids=prompt[a : a + PROMPT_IDS]) for a in starts]
        failures: tuple[type[Exception], ...] = (*self._engine.failures, UnknownVersionError)
        try:
            delta = await self.request.next()
        except failures as error:
            self.ended = True
            await self._engine.abort([self.request])
            said = f"{type(error).__name__}: {error}"
            return [StreamLine(finish_reason="error", message=said)]
        chunks = [] if self._unheard else delta.chunks
        if self._engine.adapts:
            for line in chunks:
                self._made += line.token_ids
        if delta.finish_reason is None:
            return chunks
        if delta.finish_reason == "abort" and self._moves and not self.over:
            return [*chunks, *await self._go_on()]
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
    adapters: newest adapter of each job, with which its turns begin. images: those that turns may
    name.
    """

    def __init__(self, engine: ReplicaEngine) -> None:
        self._engine = engine
        self.images = ImageCache(IMAGES_BYTES)
        self._live: set[ReplicaTurn] = set()
        self._past_tokens = 0
        self._left = asyncio.Event()
        self.hold = TurnGate()
        self.ages = KvStaleness()
        self.adapters: dict[str, HeldAdapter] = {}

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
        images = [image for each in body.images or () if (image := self.images.find(each))]
        turn = ReplicaTurn(self._engine, body, self.ages, self._adapter_of, trace, images)
        self._live.add(turn)
        return turn

    @property
    def no_images(self) -> str:
        """Reason why the engine takes no images, "" if it does."""
        return self._engine.no_images

    def missing_image(self, body: GenerateBody) -> str:
        """Return a line that names the first image of the turn that is not here, "" for none."""
        if not body.images:
            return ""
        missing = next((each for each in body.images if self.images.find(each) is None), "")
        return f"images: {missing} is not here: send its bytes first" if missing else ""

    def _adapter_of(self, job: str) -> HeldAdapter | None:
        """Return the job's newest adapter; that of the only job for a turn that names none."""
        found = self.adapters.get(job)
        if found is None and not job and len(self.adapters) == 1:
            (found,) = self.adapters.values()
        return found

    def with_adapter(self, adapter: HeldAdapter) -> "list[ReplicaTurn]":
        """Return the turns in the engine that compute with this adapter."""
        return [t for t in self._live if t.begun and not t.ended and t.adapter == adapter]

    async def move(self, adapter: HeldAdapter) -> None:
        """Let the running turns of the adapter's job go on under it, from their next tokens on."""
        turns = [
            turn
            for turn in self._live
            if turn.begun and not turn.over and not turn.ended and turn.adapter != adapter
            if self._adapter_of(turn.job) == adapter and turn.move()
        ]
        await self._engine.abort([turn.request for turn in turns if turn.request is not None])

    async def revoke_of(self, adapter: HeldAdapter) -> None:
        """Abort the turns that compute with this adapter, those too that are just starting."""
        await self._revoke(self.with_adapter(adapter))
        while True:
            if all(turn.request is not None for turn in self.with_adapter(adapter)):
                return
            # The engine takes a request within a few steps of the loop.
            await asyncio.sleep(START_POLL_S)

    async def revoke_all(self, *, but: Collection[str] = ()) -> int:
        """Abort every open turn that is not of the jobs `but`, each of which first delivers its
        tokens so far; return the number of turns.
        """
        return await self._revoke(turn for turn in self._live if turn.job not in but)

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

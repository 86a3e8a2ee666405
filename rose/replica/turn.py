"""One turn, from admission to its last line.

opened ── start ──> running ── next_lines ... ──> ended (stop, length, revoked, abort, error)
   └── revoked before it started: the engine's request is aborted as soon as there is one
"""

import asyncio
from typing import Any

from rose.replica.asgi import ClientGoneError
from rose.replica.engine_errors import ENGINE_FAILURES
from rose.replica.engine_request import EngineRequest, abort
from rose.replica.kv_ages import KvAges
from rose.replica.versions import UnknownVersionError
from rose.replica.wire import Finish, GenerateBody, Record, encode_lines


class Turn:
    """State of one turn; the stream around it owns the socket."""

    __slots__ = (
        "_ages",
        "_body",
        "_client_gone",
        "_engine",
        "begun",
        "ended",
        "request",
        "revoked",
    )

    def __init__(
        self,
        engine: Any,  # noqa: ANN401 - vLLM's AsyncLLM
        body: GenerateBody,
        ages: KvAges,
    ) -> None:
        self._engine = engine
        self._body = body
        self._ages = ages
        self._client_gone = False
        self.begun = False
        self.request: EngineRequest | None = None
        self.revoked = False
        self.ended = False

    @property
    def over(self) -> bool:
        """Whether there is nothing left to begin: it was revoked, or its client is gone."""
        return self.revoked or self._client_gone

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return 0 if self.request is None else self.request.tokens

    async def start(self) -> None:
        """Hand the turn to the engine. Raises RequestRefusedError or ClientGoneError."""
        if self._client_gone:
            raise ClientGoneError("the client left before its turn began")
        self.begun = True
        self.request = await EngineRequest.start(self._engine, self._body, self._ages)
        if self._client_gone:
            raise ClientGoneError("the client left before its turn started")
        if self.revoked:
            await abort(self._engine, [self.request])

    async def next_lines(self) -> bytes:
        """Wait for output and encode it; the line of the finish comes with the last tokens.

        Raises ClientGoneError.
        """
        assert self.request is not None
        try:
            delta = await self.request.next()
        except (*ENGINE_FAILURES, UnknownVersionError) as error:
            self.ended = True
            await abort(self._engine, [self.request])
            return encode_lines([Finish("error", f"{type(error).__name__}: {error}")])
        lines: list[Record] = [*delta.chunks]
        if delta.finish_reason is not None:
            self.ended = True
            lines.append(Finish(self._reason(delta.finish_reason)))
        return encode_lines(lines)

    def client_left(self, watch: "asyncio.Task[None]") -> None:
        """Done callback of the task that watches the client's connection."""
        if watch.cancelled() or self.ended:
            return
        self._client_gone = True
        if self.request is not None:
            self.request.interrupt(ClientGoneError("the client left its turn"))

    async def close(self) -> None:
        """Leave nothing running in the engine."""
        if not self.ended and self.request is not None:
            self.ended = True
            await abort(self._engine, [self.request])

    def _reason(self, reason: str) -> str:
        return "revoked" if self.revoked and reason == "abort" else reason

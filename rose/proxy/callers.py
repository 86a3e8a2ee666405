"""Connections of callers, gateways with certificates, and of the engines that answer them.

    head ── passes ──► asking ── an engine's connection ──► answering ── answered ──► head …
      │ does not: refused, closed    │ none: 503, closed         │ breaks off: closed at once
      └─ HEAD_S, IDLE_S, BODY_S are over: closed

An answer is forwarded in its original bytes; a parser reads them beside that, and finds its end.
A caller that reads slowly holds its engine's connection up, an engine that reads slowly its caller:
the proxy keeps no more than one socket's buffer. A caller that hangs up ends its turn.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

import httptools

from rose.errors import ConfigError
from rose.process.http_client import HttpConnection, HttpPool
from rose.process.http_port import BODY_S, HEAD_S, Connections, LimitLog, connections_allowed, warn
from rose.proxy.requests import MAX_HEAD_BYTES, PassRefusedError, passed
from rose.security.certificates import EXPIRED, Peer, peer_over
from rose.security.roles import Identity, Role

# Time for a caller to read a refusal, while the rest of its body comes in and is dropped.
LINGER_S: Final = 1.0
# Seconds for which an idle caller is kept, longer than gateways keep connections: they hang up
# first, and no turn meets a connection that closes.
IDLE_S: Final = 330.0
MOST: Final = 4_096
LOOPBACK: Final = "127.0.0.1"


class AnswerSink(Protocol):
    """Interface of the receiver of an engine's answer; its methods must not block."""

    def answer(self, data: bytes) -> None:
        """Pass the next bytes of the engine's answer on to the caller."""

    def answered(self, *, last: bool) -> None:
        """Process the end of the answer; `last`: the answer itself ends the connection."""

    def broken(self) -> None:
        """End the caller's connection, because the engine's answer broke off."""

    def hold(self, held: bool) -> None:
        """Stop reading the request while the engine's socket is full (`held`), or read on."""


def hold_reading(transport: asyncio.Transport | None, held: bool) -> None:
    """Stop reading from a socket that is open (`held`), or read on."""
    if transport is None or transport.is_closing():
        return
    if held:
        transport.pause_reading()
    else:
        transport.resume_reading()


class EngineConnection(HttpConnection[AnswerSink]):
    """One HTTP connection of the proxy to an engine on loopback."""

    most_idle = 256

    def hold(self, held: bool) -> None:
        """Stop reading the answer while the caller's socket is full (`held`), or read on."""
        hold_reading(self._transport, held)

    def took(self, receiver: AnswerSink, data: bytes) -> None:
        receiver.answer(data)

    def ended(self, receiver: AnswerSink, error: Exception | None) -> None:
        if error is None:
            receiver.answered(last=self._last)
        else:
            receiver.broken()

    def pause_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.hold(True)

    def resume_writing(self) -> None:
        if self._receiver is not None:
            self._receiver.hold(False)


class LoopbackPool(HttpPool[int, EngineConnection]):
    """Pool of kept connections to engines, by the engine's port."""

    def __init__(self) -> None:
        super().__init__(EngineConnection)


def bounded() -> Connections:
    """Return a register of callers' connections with a limit low enough that each of them can have
    a connection to an engine.
    """
    most = min(MOST, connections_allowed())
    limits = LimitLog(warn, time.monotonic)
    return Connections(most, HEAD_S, limits, time.monotonic, idle_s=IDLE_S)


@dataclass(slots=True)
class Door:
    """Settings and state that all callers' connections of a proxy share.

    ports: port of each engine by its replica's name. own: certificate identity of this node; None
    admits callers without a certificate. wall_s: returns Unix seconds. on_refused: called with a
    refused caller's address and the reason.
    """

    ports: Mapping[bytes, int]
    own: Identity | None
    wall_s: Callable[[], float]
    on_refused: Callable[[str, str], None]
    connections: Connections = field(default_factory=bounded)
    engines: LoopbackPool = field(default_factory=LoopbackPool)

    def check(self, peer: Peer | None) -> None:
        """Raise PassRefusedError unless the caller's certificate is a valid one of a gateway of
        this cluster; admit anybody if `own` is None.
        """
        if self.own is None:
            return
        if peer is None:
            raise PassRefusedError(403, "forbidden", "show a certificate")
        who = peer.identity
        if peer.not_after_s <= self.wall_s():
            raise PassRefusedError(403, "forbidden", EXPIRED.format(who))
        if who.cluster != self.own.cluster:
            mine = f"{who} is of cluster {who.cluster}; this is {self.own.cluster}"
            raise PassRefusedError(403, "forbidden", mine)
        if who.role is not Role.GATEWAY:
            raise PassRefusedError(403, "forbidden", f"{who} sends no turns; gateways do")

    def close(self) -> None:
        """Close the connections of all callers and engines."""
        self.connections.close()
        self.engines.close()


class CallerConnection(asyncio.Protocol):
    """One connection of a caller to the proxy, which also receives the engines' answers to its
    requests.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._engine: EngineConnection | None = None
        self._asking: asyncio.Task[None] | None = None
        self._slow = False
        self._begin()

    def _begin(self) -> None:
        """Reset the state of the connection for its next request."""
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._unsent: list[bytes] = []
        self._busy = self._whole = self._last = self._refused = False

    def abort(self) -> None:
        """Close the caller's connection at once, dropping unsent data."""
        if self._transport is not None:
            self._transport.abort()

    def hang_up(self) -> None:
        """Close the caller's connection after all written data is sent."""
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio's protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._door.connections.admit(self):
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._busy:
            if not self._head_bytes:
                self._door.connections.heard(self)
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, PassRefusedError):
                raise
            self._refuse(error.__context__)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(PassRefusedError(400, "bad_request", "this is no HTTP"))
        else:
            if not self._busy and self._head_bytes > MAX_HEAD_BYTES:
                what = f"a head has at most {MAX_HEAD_BYTES} bytes"
                self._refuse(PassRefusedError(431, "too_large", what))

    def connection_lost(self, error: Exception | None) -> None:
        self._door.connections.lost(self)
        self._allow(None)
        self._refused = True
        if self._asking is not None:
            self._asking.cancel()
        if self._engine is not None:
            # The engine ends the turn when its connection closes, as without a proxy.
            self._engine.close()
            self._engine = None

    def pause_writing(self) -> None:
        self._slow = True
        if self._engine is not None:
            self._engine.hold(True)

    def resume_writing(self) -> None:
        self._slow = False
        if self._engine is not None:
            self._engine.hold(False)

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        if self._busy:
            raise PassRefusedError(400, "bad_request", "wait for the answer before you ask again")

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._door.check(self._peer())
        asked = passed(self._door.ports, self._parser.get_method(), self._target, self._headers)
        self._busy = True
        self._door.connections.began(self)
        self._allow(BODY_S)
        engine = self._door.engines.take(asked.port)
        if engine is not None:
            self._ask(engine, asked.head)
            return
        self._unsent = [asked.head]
        # A caller sends no more than its socket holds until an engine reads it.
        self.hold(True)
        self._asking = asyncio.ensure_future(self._connect(asked.port))

    def on_body(self, data: bytes) -> None:
        if self._engine is not None:
            self._engine.write(data)
        else:
            self._unsent.append(data)

    def on_message_complete(self) -> None:
        # Ask the parser now: a moment later it no longer knows if the caller keeps the connection.
        self._whole, self._last = True, not self._parser.should_keep_alive()
        self._allow(None)

    # ---- `AnswerSink` ----

    def answer(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def answered(self, *, last: bool) -> None:
        self._engine = None
        if last or self._last or not self._whole:
            assert self._transport is not None
            self._refused = True
            self._transport.close()
            return
        self._begin()
        self._door.connections.answered(self)

    def broken(self) -> None:
        self._engine = None
        self.abort()

    def hold(self, held: bool) -> None:
        hold_reading(self._transport, held)

    # ---- inside ----

    async def _connect(self, port: int) -> None:
        try:
            engine = await self._door.engines.connect(port, LOOPBACK, port)
        except (OSError, TimeoutError):
            # No byte was sent to an engine: the gateway may send the turn to another replica at
            # once.
            self._asking = None
            self._refuse(PassRefusedError(503, "unavailable", "the engine does not answer"))
            return
        self._asking = None
        if self._refused:
            engine.close()
            return
        unsent, self._unsent = b"".join(self._unsent), []
        self._ask(engine, unsent)
        self.hold(False)

    def _ask(self, engine: EngineConnection, begin: bytes) -> None:
        self._engine = engine
        engine.hold(self._slow)
        engine.begin(self, begin)

    def _refuse(self, error: PassRefusedError) -> None:
        self._refused = True
        self._allow(None)
        self._door.on_refused(self._who(), str(error))
        if self._engine is not None:
            # In the middle of an answer there is no place for another one.
            self.abort()
            return
        if self._asking is not None:
            self._asking.cancel()
        if self._transport is not None:
            self._transport.write(error.answer)
            if self._busy and not self._whole:
                # A socket that is closed with unread bytes also discards the bytes that its peer
                # has not read.
                self.hold(False)
                self._allow(LINGER_S)
            else:
                self._transport.close()

    def _allow(self, seconds: float | None) -> None:
        """Set the number of seconds after which the connection is closed; None sets no limit."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(seconds, self.abort)

    def _peer(self) -> Peer | None:
        try:
            return peer_over(self._transport)
        except ConfigError as error:
            raise PassRefusedError(403, "forbidden", str(error)) from error

    def _who(self) -> str:
        at = self._transport.get_extra_info("peername") if self._transport else None
        return str(at[0]) if at else "somebody"

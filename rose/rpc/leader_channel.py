"""LeaderChannel: a client's channel to the leading scheduler of a list `HOST:PORT,HOST:PORT`.

Any address of the list leads there: a standby names the leader, and an address that does not answer
is skipped. `LeaderFinder` decides without IO which address is next, and how long to pause.

    ask the last leader ── answers ──► it leads
        │ names another ──► ask that one
        │ does not answer ──► ask the next of the list; a pause after each round
        │ falls silent ──► ask others, even if a standby names it, until one leads; for a while

A leader that hangs still has its connections, and a standby names it until the standby's own turn
comes: a client that followed that name would wait out the same silence again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
import grpc.aio

from rose.addresses import checked_addresses, is_address
from rose.errors import UnavailableError
from rose.rpc.channel import make_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.security.certificates import CertificateFiles, Material

if TYPE_CHECKING:
    from rose.rpc.rose_pb2_grpc import SchedulerAsyncStub

R = TypeVar("R")
# Trailing metadata of a standby's refusal: HOST:PORT of the leader, empty if it knows none.
LEADER_METADATA = "rose-leader"

FIRST_PAUSE_S = 0.1
# Longest pause while a new leader is expected, before leases end; later it is MAX_PAUSE_S.
SEARCH_PAUSE_S = 0.4
SEARCH_ROUNDS = 30
MAX_PAUSE_S = 5.0
# Attempts at other addresses before one that fell silent: some 2 s, less than a lease.
SKIPS = 16


class LeaderFinder:
    """Choice, without IO, of the scheduler's address to ask next, out of a list in which one leads.

    Raises `ConfigError` for an invalid list; `whose` begins the message.
    """

    def __init__(self, addresses: str, whose: str = "--scheduler") -> None:
        self.addresses = checked_addresses(addresses, whose)
        self._at = 0
        self._named = ""
        self._misses = 0
        self._silent, self._skips = "", 0

    @property
    def address(self) -> str:
        """Address HOST:PORT to ask next: the one that a standby named, else one of the list."""
        return self._named or self.addresses[self._at]

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt: 0 within a round of all addresses, else 0.1 and
        doubling to 0.4, or to 5 after 30 rounds.
        """
        size = len(self.addresses)
        rounds, left = divmod(self._misses, size + (size > 1))
        if left or not rounds:
            return 0.0
        most_s = SEARCH_PAUSE_S if rounds < SEARCH_ROUNDS else MAX_PAUSE_S
        return min(FIRST_PAUSE_S * 2.0 ** min(rounds - 1, 16), most_s)

    def answered(self) -> None:
        """Record that the address that was asked leads; the count of failed attempts begins
        anew.
        """
        self._misses = self._skips = 0
        if self._named in self.addresses:
            # If this leader is lost, the next attempt goes to another address.
            self._at, self._named = self.addresses.index(self._named), ""

    def missed(self, hint: str = "", *, silent: bool = False) -> None:
        """Record that the address that was asked does not lead: it named another (`hint`), or did
        not answer.

        silent: it sent nothing at all, though it may still accept connections; the next SKIPS
        attempts avoid it.
        """
        self._misses += 1
        if silent:
            self._silent, self._skips = self.address, SKIPS
        if is_address(hint) and hint != self.address:
            self._named = hint
        else:
            self._named = ""
            self._at = (self._at + 1) % len(self.addresses)
        others = [each for each in self.addresses if each != self._silent]
        if self.address == self._silent and others and self._skips:
            self._skips -= 1
            self._named = ""
            if self.address == self._silent:
                self._at = (self._at + 1) % len(self.addresses)


def hint_of(error: grpc.RpcError) -> str | None:
    """Return the leader's address that a standby named in its refusal, "" if it knows none; None
    for any other error.
    """
    metadata: Any = error.trailing_metadata() or ()
    return next((str(value) for key, value in metadata if key == LEADER_METADATA), None)


# A machine that is gone does not refuse connections.
CONNECT_S = 1.0
# A leader answers within 5 s, whatever its store does.
ANSWER_S = 6.0
UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class LeaderChannel:
    """gRPC channels to the schedulers of a list, one of which is presumed to lead.

    A stream calls `connected`, then `answered` at its first message and `missed` at its end, and
    waits `pause_s`. A single request uses `call`.
    """

    def __init__(
        self,
        addresses: str,
        whose: str = "--scheduler",
        certificates: CertificateFiles | None = None,
    ) -> None:
        """Check the list of addresses; certificates are read when a stream or a call begins.

        Raises `ConfigError`.
        """
        self._finder = LeaderFinder(addresses, whose)
        self._certificates = certificates
        self._shown: Material | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._given_up: list[grpc.aio.Channel] = []

    @property
    def address(self) -> str:
        """Address HOST:PORT of the scheduler to ask next."""
        return self._finder.address

    @property
    def pause_s(self) -> float:
        """Seconds to wait before `connected` is called again."""
        return self._finder.pause_s

    async def connected(self) -> grpc.aio.Channel:
        """Return a channel that is connected to the presumed leader. Raises `UnavailableError` if
        none is within CONNECT_S seconds.

        A failed call on the channel may have been carried out; after this error none was.
        """
        await self._close_given_up()
        shown = self._certificates.material() if self._certificates else None
        if shown is not self._shown:
            await self.close()
            self._shown = shown
        address = self._finder.address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = make_channel(address, self._certificates)
        try:
            async with asyncio.timeout(CONNECT_S):
                await _ready(channel)
        except (TimeoutError, UnavailableError) as error:
            # The next attempt begins anew: this channel would wait before it connects again.
            self._channels.pop(address, None)
            await channel.close(None)
            raise UnavailableError(f"no scheduler answers at {address}") from error
        return channel

    def answered(self) -> None:
        """Record that the scheduler that was asked leads."""
        self._finder.answered()

    def missed(self, error: Exception | None = None) -> None:
        """Record that a stream or call ended, with `error`: the next attempt may go to another
        scheduler.

        After a stream's silence (`TimeoutError`) its connection is given up: a stopped process
        keeps an old connection, and does not open another.
        """
        hint = hint_of(error) if isinstance(error, grpc.RpcError) else None
        if isinstance(error, TimeoutError):
            channel = self._channels.pop(self._finder.address, None)
            self._given_up += [channel] if channel else []
        silent = any(isinstance(each, TimeoutError) for each in (error, error and error.__cause__))
        self._finder.missed(hint or "", silent=silent)

    async def call(
        self, ask: "Callable[[SchedulerAsyncStub, float], Awaitable[R]]", timeout_s: float
    ) -> R:
        """Return the leader's reply to `ask`, which gets a stub and the seconds that it may take.

        It is repeated at other addresses until `timeout_s` is over, so it must be idempotent.
        Raises `UnavailableError`, or the `AioRpcError` of a refusal or the last failure.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        failure: Exception | None = None
        while True:
            try:
                stub: SchedulerAsyncStub = SchedulerStub(await self.connected())
                reply = await ask(stub, max(0.0, min(ANSWER_S, until_s - loop.time())))
            except UnavailableError as error:
                failure = error
                self.missed(error)
            except grpc.aio.AioRpcError as error:
                if error.code() not in UNANSWERED:
                    raise
                # An earlier failure says more than a deadline that is over.
                late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                failure = failure if late and failure is not None else error
                self.missed(error)
            else:
                self.answered()
                return reply
            pause_s = self.pause_s
            if loop.time() + pause_s >= until_s:
                raise failure
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Close all gRPC channels to schedulers."""
        self._given_up += self._channels.values()
        self._channels.clear()
        await self._close_given_up()

    async def _close_given_up(self) -> None:
        while self._given_up:
            await self._given_up.pop().close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _ready(channel: grpc.aio.Channel) -> None:
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise UnavailableError("it cannot be connected to")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)

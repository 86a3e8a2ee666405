"""gRPC inside the simulation: calls between processes, for the product's stubs and servicers.

    stub.Attach(reports) ── Begin(method), messages ──► handler(reports, context)
            read() ◄────────────── messages ─────────── context.write()
     AioRpcError ◄── the stream's end: its code ─────── abort(), a crash, a ping without an answer

`LeaderChannel` decides whom to ask; only the connection is simulated. Messages are copied, as they
are on a wire.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message
from typing_extensions import override

from rose.errors import UnavailableError
from rose.rpc.leader_channel import CONNECT_S, LEADER_METADATA, LeaderChannel
from tests.chaos.simulated_loop import SimulatedLoop
from tests.chaos.simulation import SimulatedProcess, Stream

PORT = 7400
ATTACH = "/rose.v1.Scheduler/Attach"
WATCH_REPLICAS = "/rose.v1.Scheduler/WatchReplicas"


def addresses_of(names: tuple[str, ...]) -> str:
    """Return the value of `--scheduler`."""
    return ",".join(f"{name}:{PORT}" for name in names)


def name_of(address: str) -> str:
    """The process at an address."""
    return address.rpartition(":")[0]


def copied(message: Message) -> Message:
    """Return a message as the other end receives it."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


@dataclass(frozen=True, slots=True)
class Begin:
    """First message of a stream: the method that is called."""

    method: str


@dataclass(frozen=True, slots=True)
class Call:
    """A unary call."""

    number: int
    method: str
    request: Message


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call: a message, or the code of a refusal and the leader that it names."""

    number: int
    message: Message | None
    code: grpc.StatusCode = grpc.StatusCode.OK
    leader: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """End of a call."""

    code: grpc.StatusCode
    details: str = ""
    leader: str = ""

    def error(self) -> grpc.aio.AioRpcError:
        """Return the error that a client gets."""
        trailing = grpc.aio.Metadata()
        if self.leader:
            trailing.add(LEADER_METADATA, self.leader)
        return grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), trailing, details=self.details)


LOST = Status(grpc.StatusCode.UNAVAILABLE, "the connection is lost")


class AbortedError(Exception):
    """A servicer ended its call."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.details)
        self.status = status


# ---- clients ----


@dataclass(frozen=True, slots=True)
class Heard:
    """A message, and when it was sent, reached this machine, and was read."""

    message: Message
    sent_s: float
    arrived_s: float


class ClientCall:
    """One call of a stream, as `grpc.aio.StreamStreamCall` is used."""

    def __init__(
        self, process: "LoopProcess", to: str, method: str, requests: AsyncIterator[Message]
    ) -> None:
        self._process = process
        self._stream = process.open_stream(to)
        self._words: asyncio.Queue[Heard | Status] = asyncio.Queue()
        self._ended: Status | None = None
        process.calls[self._stream.number] = self
        self._stream.send(process.name, Begin(method))
        self._sending = asyncio.create_task(self._send(requests))

    async def _send(self, requests: AsyncIterator[Message]) -> None:
        async for request in requests:
            self._stream.send(self._process.name, copied(request))

    def heard(self, message: Message, stream: Stream) -> None:
        """A message is here; it waits until it is read."""
        self._words.put_nowait(Heard(message, stream.sent_s, stream.arrived_s))

    def over(self, status: Status) -> None:
        """Nothing more comes."""
        self._words.put_nowait(status)

    async def read(self) -> Any:
        """The next message; raises as gRPC does when the stream is over."""
        word = self._ended or await self._words.get()
        if isinstance(word, Status):
            self._ended = word
            if word.code is grpc.StatusCode.OK:
                return grpc.aio.EOF
            raise word.error()
        self._process.word = word
        return word.message

    def cancel(self) -> None:
        """Leave it."""
        self._sending.cancel()
        self._process.calls.pop(self._stream.number, None)
        self._stream.close(self._process.name)


class SimulatedChannel:
    """Channel of a process to a scheduler, for the generated stub."""

    def __init__(self, process: "LoopProcess", to: str) -> None:
        self._process = process
        self._to = to

    def stream_stream(self, method: str, **_: object) -> Callable[..., ClientCall]:
        return lambda requests: ClientCall(self._process, self._to, method, requests)

    def unary_unary(self, method: str, **_: object) -> None:
        """Nodes make no unary calls."""

    unary_stream = stream_unary = unary_unary


class SimulatedLeaderChannel(LeaderChannel):
    """The product's way to the leader; only the connection is simulated."""

    def __init__(self, process: "LoopProcess", addresses: str) -> None:
        super().__init__(addresses)
        self._process = process

    @override
    async def connected(self) -> Any:
        process, to = self._process, name_of(self.address)
        world = process.world
        await asyncio.sleep(2 * world.delay_s())
        if not world.processes[to].up:
            raise UnavailableError(f"no scheduler answers at {self.address}")
        if world.is_cut(process.name, to) or world.processes[to].paused:
            await asyncio.sleep(CONNECT_S)
            raise UnavailableError(f"no scheduler answers at {self.address}")
        return SimulatedChannel(process, to)

    @override
    async def close(self) -> None:
        """Its streams are closed by themselves."""


class LoopProcess(SimulatedProcess):
    """Process that runs coroutines of the product."""

    loop: SimulatedLoop

    def started(self) -> None:
        self.calls: dict[int, ClientCall] = {}
        self.word: Heard | None = None
        self.loop = SimulatedLoop(self, self.world.failed)
        self.loop.run(self.begin)

    def begin(self) -> None:
        """Run its first step, inside its loop."""

    def crashed(self) -> None:
        self.loop.end()

    def keep(self, work: Callable[[], Awaitable[object]]) -> "asyncio.Task[None]":
        """Run a coroutine for as long as the process lives; its end is a bug."""

        loop = self.loop

        async def kept() -> None:
            try:
                await work()
            except Exception as error:
                if not loop.closed:
                    self.world.failed(error)
            else:
                self.world.failed(AssertionError(f"{self.name}: {work} returned"))

        return loop.create_task(kept())

    def stream_heard(self, stream: Stream, message: object) -> None:
        call = self.calls.get(stream.number)
        if call is not None and isinstance(message, Message):
            self.loop.run(lambda: call.heard(message, stream))

    def stream_ended(self, stream: Stream) -> None:
        call = self.calls.pop(stream.number, None)
        if call is not None:
            status = stream.reason if isinstance(stream.reason, Status) else LOST
            self.loop.run(lambda: call.over(status))


# ---- servers ----


class ServerContext:
    """`grpc.aio.ServicerContext` of one call; `write` is where its messages go."""

    def __init__(self, write: Callable[[Message], None]) -> None:
        self._write = write

    async def write(self, message: Message) -> None:
        self._write(copied(message))

    def invocation_metadata(self) -> tuple[()]:
        """Metadata of the call: there is none."""
        return ()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        leader = dict(trailing_metadata).get(LEADER_METADATA, "")
        raise AbortedError(Status(code, details, leader))


class ServerCall:
    """One call of a stream at a server: its requests, and the task that serves it."""

    def __init__(
        self,
        server: "LoopProcess",
        stream: Stream,
        handler: Any,
        wrote: Callable[[Stream, Message], None],
    ) -> None:
        self._server = server
        self._stream = stream
        self._requests: asyncio.Queue[Message] = asyncio.Queue()
        self._wrote = wrote
        self._task = asyncio.create_task(self._serve(handler))

    def heard(self, message: Message) -> None:
        """A request came."""
        self._requests.put_nowait(message)

    def cancel(self) -> None:
        """The client is gone."""
        self._task.cancel()

    async def _serve(self, handler: Any) -> None:
        context, status = ServerContext(self._write), Status(grpc.StatusCode.OK)
        try:
            if handler.request_streaming:
                await handler.stream_stream(self._stream_of_requests(), context)
            else:
                await handler.unary_stream(await self._requests.get(), context)
        except AbortedError as aborted:
            status = aborted.status
        except Exception as error:
            self._server.world.failed(error)
        self._stream.close(self._server.name, status)

    async def _stream_of_requests(self) -> AsyncIterator[Message]:
        while True:
            yield await self._requests.get()

    def _write(self, message: Message) -> None:
        if self._server.name not in self._stream.closed:
            self._wrote(self._stream, message)
            self._stream.send(self._server.name, message)


async def answer(handler: Any, call: Call) -> Reply:
    """Serve a unary call. What a servicer lets through goes to the caller of this."""

    def none(message: Message) -> None:
        raise AssertionError("a unary call writes nothing")

    try:
        message = await handler.unary_unary(copied(call.request), ServerContext(none))
    except AbortedError as aborted:
        return Reply(call.number, None, aborted.status.code, aborted.status.leader)
    return Reply(call.number, message)


def handler_of(handlers: Any, method: str) -> Any:
    """Return the handler as a server finds it."""
    return handlers.service(SimpleNamespace(method=method))

"""The node's stream to the scheduler: reports up, commands down, reconnected for ever.

A broken stream changes nothing here: leases run out by themselves and the guests freeze.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from rose.eventlog import EventLog
from rose.rpc import rose_pb2, rose_pb2_grpc

PROTOCOL = 1
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
REPORT_INTERVAL_S = 0.5


class SchedulerSession:
    """Keeps an Attach stream open. `reports` gives what to say now; `obey` takes a command."""

    def __init__(
        self,
        scheduler: str,
        node: str,
        reports: Callable[[], list[rose_pb2.NodeReport]],
        obey: Callable[[rose_pb2.NodeCommand], Awaitable[list[rose_pb2.NodeReport]]],
        events: EventLog,
    ) -> None:
        self._scheduler = scheduler
        self._node = node
        self._reports = reports
        self._obey = obey
        self._events = events
        self._changed = asyncio.Event()
        self._answers: asyncio.Queue[rose_pb2.NodeReport] = asyncio.Queue(maxsize=1_024)

    def changed(self) -> None:
        """Report soon instead of at the next interval."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        async with grpc.aio.insecure_channel(self._scheduler) as channel:
            stub = rose_pb2_grpc.SchedulerStub(channel)
            while True:
                try:
                    async for command in stub.Attach(self._outgoing()):
                        backoff_s = FIRST_BACKOFF_S
                        for answer in await self._obey(command):
                            self._answers.put_nowait(answer)
                        self._changed.set()
                except grpc.aio.AioRpcError as error:
                    self._events.write("scheduler_lost", message=str(error.details()))
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _outgoing(self) -> AsyncIterator[rose_pb2.NodeReport]:
        yield rose_pb2.NodeReport(node=self._node, hello=rose_pb2.Hello(protocol=PROTOCOL))
        while True:
            self._changed.clear()
            for report in self._reports():
                yield report
            while not self._answers.empty():
                yield self._answers.get_nowait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), REPORT_INTERVAL_S)

"""The node's stream to the scheduler: reports up, commands down, reconnected for ever.

A broken stream changes nothing here: leases run out by themselves and the guests freeze.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from rose.eventlog import EventLog
from rose.node.orders import check_order
from rose.rpc import rose_pb2, rose_pb2_grpc
from rose.rpc.channel import make_channel

PROTOCOL = 1
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
REPORT_INTERVAL_S = 0.5
MAX_PENDING_REPORTS = 1_024


class SchedulerSession:
    """Keeps an Attach stream open. `reports` gives what to say now; `obey` takes a command.

    cluster, relay_url: which nodes it shares weights with, and where they find it.
    `obey` must not wait for an engine: renewals of other leases stand behind it.
    """

    def __init__(
        self,
        scheduler: str,
        node: str,
        reports: Callable[[], list[rose_pb2.NodeReport]],
        obey: Callable[[rose_pb2.NodeCommand], None],
        events: EventLog,
        cluster: str = "",
        relay_url: str = "",
    ) -> None:
        self._hello = rose_pb2.Hello(protocol=PROTOCOL, cluster=cluster, relay_url=relay_url)
        self._scheduler = scheduler
        self._node = node
        self._reports = reports
        self._obey = obey
        self._events = events
        self._changed = asyncio.Event()
        self._pending: deque[rose_pb2.NodeReport] = deque(maxlen=MAX_PENDING_REPORTS)

    def changed(self) -> None:
        """Report soon instead of at the next interval."""
        self._changed.set()

    def say(self, report: rose_pb2.NodeReport) -> None:
        """Send a report of its own, soon."""
        report.node = self._node
        self._pending.append(report)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        async with make_channel(self._scheduler) as channel:
            stub = rose_pb2_grpc.SchedulerStub(channel)
            while True:
                # Leases of a lost stream are over for the scheduler: what was left to say is moot.
                self._pending.clear()
                try:
                    async for command in stub.Attach(self._outgoing()):
                        backoff_s = FIRST_BACKOFF_S
                        self._take(command)
                except grpc.aio.AioRpcError as error:
                    self._events.write("scheduler_lost", message=str(error.details()))
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _take(self, command: rose_pb2.NodeCommand) -> None:
        """Obey one command. One that cannot be obeyed is left out: the next ones still count."""
        try:
            check_order(command)
            self._obey(command)
        except Exception as error:  # noqa: BLE001 - a scheduler's mistake must not end a node
            kind, message = command.WhichOneof("command"), str(error) or repr(error)
            self._events.write("command_refused", command=kind, message=message[:300])

    async def _outgoing(self) -> AsyncIterator[rose_pb2.NodeReport]:
        yield rose_pb2.NodeReport(node=self._node, hello=self._hello)
        while True:
            self._changed.clear()
            # Ends first: an offer before them would speak of a lease that is over.
            while self._pending:
                yield self._pending.popleft()
            for report in self._reports():
                yield report
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._changed.wait()

"""Session with the scheduler that leads: reports go up, commands come down, reconnected for ever.

A report is the node's offers and telemetry at that moment. A broken stream changes nothing here:
leases run out by themselves and the guests freeze.

A node that stood still (SIGSTOP, a suspended machine, a loop that hung) finds in its socket what
the leader said meanwhile: grants among it whose leases may be over by now. It obeys none of that:
it leaves the stream and attaches anew, and is told what holds now.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from rose.clock import Stall, boot_clock_s
from rose.errors import UnavailableError
from rose.logs.eventlog import EventLog
from rose.node.orders import SchedulerCaps, check_order
from rose.release import release
from rose.rpc import rose_pb2, rose_pb2_grpc
from rose.rpc.leader_channel import LeaderChannel
from rose.rpc.silence import read_unless_silent
from rose.security.certificates import CertificateFiles

PROTOCOL = 2
# A leader renews leases, and says that it lives, each second. One that is silent for longer is
# gone, and there are 2 s left of a lease to find the next one.
SILENT_S = 3.0
# A node that stood still for longer does not believe what waits for it: a fifth of a lease's life,
# half of the least that `staleAfter` can be.
STALL_S = 1.0
REPORT_INTERVAL_S = 0.5
MAX_PENDING_REPORTS = 1_024


class StalledError(UnavailableError):
    """This process stood still while a stream was open."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Name of a node, and what it tells a scheduler of itself.

    cluster, relay_url: the nodes with which it shares weights, and where they fetch them. labels:
    by which capacity policies select it.
    """

    node: str
    cluster: str = ""
    relay_url: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


class SchedulerSession:
    """Keeps an Attach stream to the leader open; `reports` gives what to say, `obey` takes orders.

    scheduler: HOST:PORT, several with commas; raises `ConfigError` for what is none.
    caps: told when a scheduler is heard, and when it is lost.
    clock: one that counts suspended time.
    `obey` must not wait for an engine: renewals of other leases stand behind it.
    """

    def __init__(
        self,
        scheduler: str,
        identity: NodeIdentity,
        reports: Callable[[], list[rose_pb2.NodeReport]],
        obey: Callable[[rose_pb2.NodeCommand], None],
        events: EventLog,
        certificates: CertificateFiles | None = None,
        caps: SchedulerCaps | None = None,
        clock: Callable[[], float] = boot_clock_s,
    ) -> None:
        self._clock = clock
        self._hello = rose_pb2.Hello(
            protocol=PROTOCOL,
            cluster=identity.cluster,
            relay_url=identity.relay_url,
            labels=identity.labels,
            takes_caps=True,
            takes_renewals=True,
            release=release(),
            obeys=True,
        )
        self._caps = caps or SchedulerCaps()
        self._leader = LeaderChannel(scheduler, "the node's scheduler", certificates)
        self._lost = False
        self._holds = False
        self._greeted = self._beats = False
        self._node = identity.node
        self._reports = reports
        self._obey = obey
        self._events = events
        self._changed = asyncio.Event()
        self._pending: deque[rose_pb2.NodeReport] = deque(maxlen=MAX_PENDING_REPORTS)

    def changed(self) -> None:
        """Report soon instead of at the next interval."""
        self._changed.set()

    def say(self, **report: Any) -> None:  # noqa: ANN401 -- fields of a message
        """Send a report with these fields, soon."""
        self._pending.append(rose_pb2.NodeReport(node=self._node, **report))
        self._changed.set()

    async def run(self) -> None:
        async with self._leader as leader:
            while True:
                # Leases of a lost stream are over for the scheduler: what was left to say is moot.
                self._pending.clear()
                ended: Exception | None = None
                try:
                    stub = rose_pb2_grpc.SchedulerStub(await leader.connected())
                    # From before the stream is there: what stands in it is then younger than that.
                    stall = Stall(STALL_S, self._clock)
                    await self._follow(stub.Attach(self._outgoing()), stall)
                except StalledError as error:
                    self._events.write("session_stalled", message=str(error))
                    self._caps.lost()
                    continue  # nothing speaks against the same leader
                except grpc.aio.AioRpcError as error:
                    ended = error
                    self._miss(str(error.details()))
                except (UnavailableError, TimeoutError) as error:
                    ended = error
                    self._miss(str(error) or "it has fallen silent")
                self._caps.lost()
                leader.missed(ended)
                await asyncio.sleep(leader.pause_s)

    async def _follow(self, call: "grpc.aio.StreamStreamCall[Any, Any]", stall: Stall) -> None:
        """Obey one stream to its end. Raises TimeoutError where the leader falls silent.

        Raises StalledError where this process stood still. Whoever leads says its mode at once.
        """

        def look() -> None:
            if stood_s := stall.look():
                raise StalledError(
                    f"this node stood still for {stood_s:.1f} s; what waited for it is old"
                )

        self._greeted = self._beats = False
        try:
            while True:
                command = await read_unless_silent(
                    call.read(),
                    SILENT_S,
                    self._clock,
                    expected=lambda: not self._greeted or self._holds or self._beats,
                    look=look,
                )
                if not isinstance(command, rose_pb2.NodeCommand):
                    return
                self._greeted = True
                self._leader.answered()
                self._lost = False
                self._caps.heard()
                self._beats = self._beats or command.WhichOneof("command") is None
                for order in _apart(command):
                    self._take(order)
        finally:
            call.cancel()

    def _miss(self, why: str) -> None:
        """Record that the leader is lost, once until one is found."""
        if not self._lost:
            self._lost = True
            self._events.write("scheduler_lost", message=why)

    def _take(self, command: rose_pb2.NodeCommand) -> None:
        """Obey one command. One that cannot be obeyed is left out: the next ones still count."""
        try:
            check_order(command)
            self._obey(command)
            if order := command.harvest.order:
                self.say(obeyed=rose_pb2.Obeyed(order=order))
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
                if report.HasField("offers"):
                    self._holds = any(offer.HasField("held") for offer in report.offers.offers)
                yield report
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._changed.wait()


def _apart(command: rose_pb2.NodeCommand) -> Sequence[rose_pb2.NodeCommand]:
    """Renewals that come together, each by itself: one that is refused leaves the others."""
    if command.WhichOneof("command") != "renewals":
        return (command,)
    return [rose_pb2.NodeCommand(lease=lease) for lease in command.renewals.leases]

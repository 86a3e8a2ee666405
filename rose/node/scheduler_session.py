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
    """Error raised when this process was suspended or hung for longer than STALL_S while its stream
    was open.
    """


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Name of a node and what its hello tells the scheduler.

    cluster: label of the nodes with which it shares weights. relay_url: URL at which they fetch
    weights from it, "" without a relay. labels: labels by which capacity policies select nodes.
    """

    node: str
    cluster: str = ""
    relay_url: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


class SchedulerSession:
    """Client of the scheduler: it keeps an Attach stream to the leader open, sends reports and
    obeys commands.

    scheduler: HOST:PORT, several with commas; an invalid one raises ConfigError. reports: returns
    the reports to send now, called every half second. obey: carries out one command; it must not
    wait for an engine, because renewals of other leases are queued behind it. caps: is told when a
    stream opens and ends. clock: seconds of a clock that counts suspended time.
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
        """Wake the sender so that reports are sent now instead of at the next interval."""
        self._changed.set()

    def say(self, **report: Any) -> None:  # noqa: ANN401 -- fields of a message
        """Queue one NodeReport with these fields, to be sent before the regular reports; a queue of
        a lost stream is dropped.
        """
        self._pending.append(rose_pb2.NodeReport(node=self._node, **report))
        self._changed.set()

    async def run(self) -> None:
        async with self._leader as leader:
            while True:
                # Leases of a lost stream are over for the scheduler: pending reports on them are
                # moot.
                self._pending.clear()
                ended: Exception | None = None
                try:
                    stub = rose_pb2_grpc.SchedulerStub(await leader.connected())
                    # The stall clock starts before the stream exists, so every message in the
                    # stream is younger.
                    stall = Stall(STALL_S, self._clock)
                    await self._follow(stub.Attach(self._outgoing()), stall)
                except StalledError as error:
                    self._events.write("session_stalled", message=str(error))
                    self._caps.lost()
                    continue  # the same leader is tried again at once
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
        """Read and obey commands until the stream ends.

        Raises TimeoutError if the leader is silent for SILENT_S, and StalledError if this process
        stood still. A leader sends its harvest mode at once.
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
        """Log `scheduler_lost` with the reason, once until a leader answers again."""
        if not self._lost:
            self._lost = True
            self._events.write("scheduler_lost", message=why)

    def _take(self, command: rose_pb2.NodeCommand) -> None:
        """Check and obey one command, and confirm a numbered harvest order; a command that fails is
        logged as refused and skipped.
        """
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
            # Send ends of leases first: an offer before them would name a lease that is over.
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
    """Return the command as a list of commands: one lease command for each renewal in it, so that a
    refused one leaves the others; any other command alone.
    """
    if command.WhichOneof("command") != "renewals":
        return (command,)
    return [rose_pb2.NodeCommand(lease=lease) for lease in command.renewals.leases]

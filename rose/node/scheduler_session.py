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
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from executor import GuestState
from rose.clock import Stall, boot_clock_s
from rose.errors import UnavailableError
from rose.logs.eventlog import EventLog
from rose.node.config import ReplicaConfig
from rose.node.grants.caps import Contact
from rose.node.grants.guard_thread import GuardThread
from rose.node.hosts.host import summed
from rose.node.lease_agent import check_order
from rose.node.replica import Replica
from rose.node.telemetry.memory_gauges import Held
from rose.node.telemetry.node_metrics import ReplicaFigures
from rose.release import release
from rose.rpc import rose_pb2, rose_pb2_grpc
from rose.rpc.leader_channel import LeaderChannel
from rose.rpc.silence import read_unless_silent
from rose.security.certificates import CertificateFiles

OFFER_TTL_S = 3.0
_KINDS = {
    "guest": rose_pb2.REPLICA_KIND_GUEST,
    "dedicated": rose_pb2.REPLICA_KIND_DEDICATED,
}


def build_reports(
    node: str,
    replicas: Mapping[str, Replica],
    guards: Mapping[str, GuardThread],
    hosts: Sequence[rose_pb2.HostTelemetry] = (),
    left: tuple[int, int] = (0, 0),
) -> list[rose_pb2.NodeReport]:
    """Offers of all replicas, then telemetry of hosts and guests.

    `left`: requests of hosts that are gone, which met their targets and did not.
    """
    offers = rose_pb2.Offers(offers=[_offer(replica) for replica in replicas.values()])
    telemetry = rose_pb2.Telemetry(
        guests=[_guest(replica, guards.get(name)) for name, replica in replicas.items()],
        hosts=hosts if len(hosts) > 1 else (),
    )
    if hosts:
        telemetry.host.CopyFrom(summed(hosts, left))
    return [
        rose_pb2.NodeReport(node=node, offers=offers),
        rose_pb2.NodeReport(node=node, telemetry=telemetry),
    ]


def view_of(replica: Replica, guard: GuardThread | None, held: Held | None) -> ReplicaFigures:
    """What `/metrics` shows of a replica."""
    view = ReplicaFigures(
        name=replica.config.id,
        state=replica.supervisor.state.value,
        restarts=replica.supervisor.restarts,
        policy_version=replica.version,
    )
    if guard is None:
        return view
    return replace(
        view,
        duty=guard.duty(),
        granted=guard.granted,
        grant=guard.grant,
        guest=guard.guest,
        owed_bytes=guard.owed_bytes,
        held=held,
    )


def _offer(replica: Replica) -> rose_pb2.Offer:
    config = replica.config
    return rose_pb2.Offer(
        replica=config.id,
        kind=_KINDS[config.kind],
        url=replica.url,
        kv_tokens=config.kv_tokens,
        decode_tok_s=config.decode_tok_s,
        prefill_tok_s=config.prefill_tok_s,
        max_sequences=config.max_sequences,
        policy_version=replica.version,
        job=replica.job,
        model=replica.model,
        models=sorted(replica.config.folders.keys() - {replica.model}),
        near=replica.near,
        healthy=replica.offered,
        ttl_s=OFFER_TTL_S,
        epoch=replica.lease_agent.core.status().epoch,
        held=replica.lease_agent.held(),
    )


def _guest(replica: Replica, guard: GuardThread | None) -> rose_pb2.GuestTelemetry:
    grant = guard.grant if guard else None
    state = (guard.guest or GuestState()) if guard else replica.gauge.reading
    reason = "" if grant is None else grant.reason
    if grant is not None and grant.token_budget and isinstance(state, GuestState):
        reason = state.gate_reason
    return rose_pb2.GuestTelemetry(
        replica=replica.config.id,
        lend_bytes=_lend_bytes(replica.config, guard),
        kv_bytes=state.bytes_mapped if isinstance(state, GuestState) else 0,
        mode=grant.mode.name.lower() if grant else "none",
        reason=reason,
        tokens_total=state.tokens_total,
        running=state.running,
        waiting=state.waiting,
        duty=guard.duty() if guard else 1.0,
        policy_version=replica.version,
        state=replica.supervisor.state.value,
        restarts=replica.supervisor.restarts,
    )


def _apart(command: rose_pb2.NodeCommand) -> Sequence[rose_pb2.NodeCommand]:
    """Renewals that come together, each by itself: one that is refused leaves the others."""
    if command.WhichOneof("command") != "renewals":
        return (command,)
    return [rose_pb2.NodeCommand(lease=lease) for lease in command.renewals.leases]


def _lend_bytes(config: ReplicaConfig, guard: GuardThread | None) -> int | None:
    """KV memory of a guest that has everything; beyond its own only what its host does not use."""
    if guard is None:
        return None
    own, host = config.kv_base_bytes, guard.host
    if own is None or own >= config.kv_bytes:
        return config.kv_bytes
    if host is None or not host.kv_total:
        return own
    return own + round((config.kv_bytes - own) * (1.0 - host.kv_used / host.kv_total))


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


class SchedulerSession:
    """Keeps an Attach stream to the leader open; `reports` gives what to say, `obey` takes orders.

    scheduler: HOST:PORT, several with commas; raises `ConfigError` for what is none.
    cluster, relay_url: which nodes it shares weights with, and where they find it. labels: what
    capacity policies select it by. contact: told when a scheduler is heard, and when it is lost.
    clock: one that counts suspended time.
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
        certificates: CertificateFiles | None = None,
        labels: Mapping[str, str] | None = None,
        contact: Contact | None = None,
        clock: Callable[[], float] = boot_clock_s,
    ) -> None:
        self._clock = clock
        self._hello = rose_pb2.Hello(
            protocol=PROTOCOL,
            cluster=cluster,
            relay_url=relay_url,
            labels=labels,
            takes_caps=True,
            takes_renewals=True,
            release=release(),
            obeys=True,
        )
        self._contact = contact or Contact()
        self._leader = LeaderChannel(scheduler, "the node's scheduler", certificates)
        self._lost = False
        self._holds = False
        self._greeted = self._beats = False
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
                    self._contact.lost()
                    continue  # nothing speaks against the same leader
                except grpc.aio.AioRpcError as error:
                    ended = error
                    self._miss(str(error.details()))
                except (UnavailableError, TimeoutError) as error:
                    ended = error
                    self._miss(str(error) or "it has fallen silent")
                self._contact.lost()
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
                self._contact.heard()
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
                self.say(rose_pb2.NodeReport(obeyed=rose_pb2.Obeyed(order=order)))
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

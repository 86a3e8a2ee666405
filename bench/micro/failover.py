"""Time in which a cluster is without a leading scheduler.

    python -m bench.micro.failover [--rounds N] [--how HOW] [--late S] [--out FILE]

Prints one JSON object. Two scheduler processes share a SQLite file; a node's session, a gateway's
watch and a trainer follow whoever leads. In each round the leader is killed, asked to stop, or
stopped (SIGSTOP); the times are from that moment until the other one leads (`led_s`), the node's
lease is renewed (`renewed_s`), the gateway has a table (`table_s`), and a version of a trainer that
was connected to the old leader is announced (`announced_s`). `--late`: for so long the other
scheduler stands still too, as on a machine that is overloaded. Exit code 1 when a lease was lost,
or one of the first three is above 5 s.
"""

import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.processes import ProcessFleet
from bench.common.report import parser_of, put_judged
from rose.addresses import free_ports
from rose.errors import UnavailableError
from rose.gateway.replicas.table import ReplicaEntry
from rose.gateway.replicas.watch import WatchedTable
from rose.logs.eventlog import EventLog
from rose.node.lease import HeldLease
from rose.node.scheduler_session import NodeIdentity, SchedulerSession
from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LeaderChannel

JOB, REPLICA = "grpo", "g0"
MOST_TURNS = 64
HOWS = {"dies": signal.SIGKILL, "stops": signal.SIGTERM, "hangs": signal.SIGSTOP}
# An event that takes longer than this will not happen.
PATIENCE_S = 60.0
MOST_S = 5.0
LOOK_S = 0.01


class SchedulerProcesses(ProcessFleet):
    """Schedulers on one store, by number; each writes its events into a folder of its own."""

    def __init__(self, folder: Path, store: str, count: int = 2) -> None:
        super().__init__(folder)
        ports = free_ports(count)
        self.addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        self._schedulers = [
            self.launch(
                *(str(number), "rose.main.scheduler", f"--port={port}", f"--store={store}"),
                *(f"--log-dir={folder}/{number}", "--harvest=ACTIVE"),
            )
            for number, port in enumerate(ports)
        ]

    def events(self, number: int) -> str:
        """Return the event log of a scheduler."""
        log = self.folder / str(number) / "events-scheduler.jsonl"
        return log.read_text() if log.exists() else ""

    def leader(self, but: int | None = None) -> int | None:
        """Return the number of the running scheduler that leads, by its log; None without one."""
        for number, scheduler in enumerate(self._schedulers):
            events = self.events(number)
            leads = events.rfind("scheduler_leads") > events.rfind("steps_down")
            if number != but and scheduler.running and leads:
                return number
        return None

    def end(self, number: int, how: signal.Signals) -> None:
        """Send a signal; return once the process is gone, unless SIGSTOP only stopped it."""
        self._schedulers[number].send(how)
        if how is not signal.SIGSTOP:
            self._schedulers[number].popen.wait()

    def resume(self, number: int) -> None:
        self._schedulers[number].send(signal.SIGCONT)

    def close(self) -> None:
        for scheduler in self._schedulers:
            scheduler.kill()


class FollowingNode:
    """The session of a node with one replica, whose lease is kept as its agent would.

    url: the replica's; nothing answers at the default one.
    """

    def __init__(self, addresses: str, folder: Path, url: str = "http://127.0.0.1:9") -> None:
        self._url = url
        self.lease = HeldLease()
        self.epochs: list[int] = []
        self.refused = 0
        self.ended: list[str] = []
        self.events = EventLog(folder, "node")
        self.session = SchedulerSession(
            addresses, NodeIdentity("n0"), self._reports, self._obey, self.events
        )

    def _reports(self) -> list[pb.NodeReport]:
        now_s = time.monotonic()
        held = None
        if self.lease.active(now_s):
            left_s = self.lease.until_s - now_s
            held = pb.HeldLease(job=JOB, epoch=self.lease.epoch, left_s=left_s)
        offer = pb.Offer(
            replica=REPLICA,
            kind=pb.REPLICA_KIND_GUEST,
            url=self._url,
            max_sequences=MOST_TURNS,
            ttl_s=3.0,
            healthy=True,
            epoch=self.lease.epoch,
            held=held,
        )
        return [pb.NodeReport(node="n0", offers=pb.Offers(offers=[offer]))]

    def _obey(self, command: pb.NodeCommand) -> None:
        if command.HasField("lease"):
            taken = self.lease.grant(command.lease.epoch, command.lease.ttl_s, time.monotonic())
            self.refused += not taken
            self.epochs.append(command.lease.epoch)
        if command.HasField("release"):
            self.ended.append(command.release.reason)


class FollowingGateway:
    """A gateway's view of the table: each time, the epochs of leased replicas."""

    def __init__(self, addresses: str) -> None:
        self.tables: list[dict[str, int]] = []
        self.watch = WatchedTable(addresses, "gw", 5.0, lambda *a, **kw: None)

    def sink(self, entries: tuple[ReplicaEntry, ...], jobs: tuple[str, ...]) -> None:
        del jobs
        self.tables.append({each.id: each.lease_epoch for each in entries if each.leased})


@contextlib.asynccontextmanager
async def following(
    schedulers: SchedulerProcesses, folder: Path
) -> AsyncIterator[tuple[FollowingNode, FollowingGateway]]:
    """Run a node and a gateway, each with its own way to the leader."""
    node = FollowingNode(schedulers.addresses, folder)
    gateway = FollowingGateway(schedulers.addresses)
    tasks = [
        asyncio.create_task(node.session.run()),
        asyncio.create_task(gateway.watch.run(gateway.sink)),
    ]
    try:
        yield node, gateway
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        node.events.close()


async def leased(node: FollowingNode, gateway: FollowingGateway) -> None:
    """Wait until the replica is leased, and both know it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while gateway.tables[-1:] != [{REPLICA: 1}] or not node.epochs:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        seen = f"tables {gateway.tables[-3:]}, epochs {node.epochs[-3:]}, {node.lease}"
        raise UnavailableError(f"the replica was not leased, or not once: {seen}") from None


async def announce(channel: LeaderChannel, version: int) -> None:
    """Announce a version that no replica will fetch."""
    request = pb.AnnounceVersionRequest(
        job=JOB, version=version, parent=version - 1, url="http://127.0.0.1:9"
    )
    await channel.call(
        lambda stub, left_s: stub.AnnounceVersion(request, timeout=left_s), PATIENCE_S
    )


async def register(channel: LeaderChannel) -> int:
    """Register the job; returns its newest version."""
    request = pb.RegisterJobRequest(job=JOB, max_staleness=9)
    call = channel.call(lambda stub, left_s: stub.RegisterJob(request, timeout=left_s), PATIENCE_S)
    return (await call).latest_version


@dataclass(frozen=True, slots=True)
class Failover:
    """One round: seconds from the moment at which the leader ended."""

    how: str
    led_s: float
    renewed_s: float
    table_s: float
    announced_s: float
    lease_kept: bool

    @property
    def in_time(self) -> bool:
        """True if leases and turns went on within the bound."""
        return self.lease_kept and max(self.led_s, self.renewed_s, self.table_s) <= MOST_S


async def fail_over(how: str, folder: Path, late_s: float = 0.0) -> Failover:
    """End a leader in one way, and measure; the other one may lead after `late_s`."""
    with SchedulerProcesses(folder, str(folder / "store.sqlite")) as schedulers:
        async with (
            following(schedulers, folder) as (node, gateway),
            LeaderChannel(schedulers.addresses) as trainer,
        ):
            await register(trainer)
            await leased(node, gateway)
            first = schedulers.leader()
            assert first is not None
            tables, renewals = len(gateway.tables), len(node.epochs)
            began_s = time.monotonic()
            schedulers.end(first, HOWS[how])
            if late_s:
                schedulers.end(1 - first, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(late_s, schedulers.resume, 1 - first)

            async def since(happened: Callable[[], bool]) -> float:
                async with asyncio.timeout(PATIENCE_S):
                    while not happened():  # noqa: ASYNC110 - another process's doing
                        await asyncio.sleep(LOOK_S)
                return round(time.monotonic() - began_s, 2)

            async def announced() -> float:
                await announce(trainer, 1)
                return round(time.monotonic() - began_s, 2)

            led_s, renewed_s, table_s, announced_s = await asyncio.gather(
                since(lambda: schedulers.leader(but=first) is not None),
                since(lambda: len(node.epochs) > renewals),
                since(lambda: len(gateway.tables) > tables),
                announced(),
            )
            kept = set(node.epochs) == {1} and not node.refused and not node.ended
            kept &= all(table == {REPLICA: 1} for table in gateway.tables[tables:])
            return Failover(how, led_s, renewed_s, table_s, announced_s, kept)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "bench.micro.failover", rounds=3, late=0.0)
    parser.add_argument("--how", choices=[*HOWS], help="how the leader ends; else each way")
    options = parser.parse_args(argv)
    found = []
    for how in [options.how] if options.how else HOWS:
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append(asyncio.run(fail_over(how, Path(folder), options.late)))
    result = {"rows": found, "load": {"late_s": options.late}}
    return put_judged(result, options.out, good=all(each.in_time for each in found))


if __name__ == "__main__":
    sys.exit(main())

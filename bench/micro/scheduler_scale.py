"""Number of nodes that one scheduler carries.

    python -m bench.micro.scheduler_scale [--grpc] [--nodes N] [--seconds N]

Prints one JSON object. Stand-in nodes attach, report offers and telemetry once a second each, obey
leases, and some take a replica back every second; gateways report their demand. Their messages go
through `rose.scheduler.wire` into `SchedulerCore.step`, and whatever it sends is serialised, as in
the scheduler's process; sockets are left out, so gRPC's own time per message is not in the figures.
Time is the load's: `cpu_share` is CPU seconds that the scheduler needs for each of its seconds.
`start_cpu_s` is what it takes until all nodes have attached and all replicas are leased. A new
gateway gets the newest table as soon as the step that runs is done: `first_table_s` is the longest
step with the time to serialise and read a table.

`--grpc` plays the same fleet over real connections into a real scheduler process:

    scheduler process  <── a connection for each node ──  load process (this module, `--address`)
                       <── 4 gateways: table and demand ──

There `cpu_share` is the process's, as the kernel counts it, and `first_table_s` the longest wait of
a gateway that was new. A stand-in node names the leases it holds, obeys releases, and now and then
takes a replica back; no code of a real node runs in it.
Exit code 1 when `cpu_share` or `first_table_s` is above its target.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from bench.common.processes import BenchProcess, ProcessFleet, python, scheduler_command
from bench.common.report import parser_of, put_judged, reported
from elastic_scheduler import HarvestMode
from rose.addresses import free_port
from rose.errors import UnavailableError
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import channel_options
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.scheduler import wire
from rose.scheduler.core.messages import (
    Action,
    Command,
    Event,
    JobRegistered,
    LogRecord,
    PublishTable,
    Reserve,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import load
from slo import percentile

JOBS = ("grpo", "ppo")
# Nodes with one cluster label.
OF_CLUSTER = 50
# Time from a lease to the first token of its job.
SWITCH_S = 0.02
OFFER_TTL_S = 3.0
START_S = 180.0
WARM_UP_S = 15.0
NEWCOMER_EVERY_S = 2.0
AGAIN_S = 0.4
# Switches of one report.
MOST_SWITCHES = 2_000
# Connections that begin at once.
ATTACH_A_S = 200
TICKS_A_S = 10
MOST_CPU_SHARE = 0.5
MOST_TABLE_S = 1.0
WALL_S = 1.7e9


def hello(number: int) -> pb.Hello:
    """Return the first message of node `number`."""
    return pb.Hello(
        protocol=2,
        cluster=f"c{number // OF_CLUSTER}",
        relay_url=f"http://{_host(number)}:7500",
        takes_caps=True,
        takes_renewals=True,
    )


def guest_offer(
    number: int, each: int, epoch: int, job: str, held: pb.HeldLease | None = None
) -> pb.Offer:
    """Return the offer of guest `each` of node `number`, with a version of a named `job`."""
    return pb.Offer(
        replica=f"n{number}.g{each}",
        kind=pb.REPLICA_KIND_GUEST,
        url=f"http://{_host(number)}:{9000 + each}",
        kv_tokens=100_000,
        decode_tok_s=900.0,
        prefill_tok_s=9_000.0,
        policy_version=1 if job else 0,
        healthy=True,
        ttl_s=OFFER_TTL_S,
        epoch=epoch,
        max_sequences=16,
        job=job,
        model="m",
        held=held,
    )


def host_telemetry(node: str, now_s: float) -> pb.HostTelemetry:
    return pb.HostTelemetry(node=node, busy_share=0.3, slo_good=int(now_s * 10), slo_bad=1)


def _host(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250}"


def demand(gateway: str, nodes: int, switches: list[pb.Switch]) -> pb.DemandReport:
    """Return a gateway's report of much work for every job."""
    jobs = [
        pb.JobDemand(job=job, turns=40 * nodes, owed_tokens=1e9, made_tok_s=1e6) for job in JOBS
    ]
    return pb.DemandReport(gateway=gateway, jobs=jobs, switches=switches)


def channel_to(address: str) -> grpc.aio.Channel:
    """Return a connection that is not shared, as that of a process of its own."""
    options = (*channel_options(), ("grpc.use_local_subchannel_pool", 1))
    return grpc.aio.insecure_channel(address, options=options)


class StandInNode:
    """A node on a connection of its own, which reports its state at a pace and at once when woken.

    A subclass says how it introduces itself, what its state is, and how it obeys.
    """

    report_s = 1.0

    def __init__(self, address: str, name: str) -> None:
        self.name = name
        self.due: list[pb.NodeReport] = []
        self._stub = SchedulerStub(channel_to(address))
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Report and obey until the stream ends."""
        with suppress(grpc.aio.AioRpcError):
            async for command in self._stub.Attach(self._reports()):
                await self.obey(command)

    def wake(self) -> None:
        """Report at once."""
        self._wake.set()

    def report(self, **what: Any) -> pb.NodeReport:  # noqa: ANN401 -- a field of the message
        """Return a message of this node."""
        return pb.NodeReport(node=self.name, **what)

    def hello(self) -> pb.Hello:
        """Return its first message."""
        raise NotImplementedError

    def state(self) -> Iterator[pb.NodeReport]:
        """Yield what it reports each time."""
        raise NotImplementedError

    async def obey(self, command: pb.NodeCommand) -> None:
        """Carry out a command."""
        raise NotImplementedError

    async def _reports(self) -> AsyncIterator[pb.NodeReport]:
        yield self.report(hello=self.hello())
        next_s = time.monotonic()
        while True:
            self._wake.clear()
            for report in self.state():
                yield report
            next_s = max(time.monotonic(), next_s + self.report_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(next_s - time.monotonic()):
                    await self._wake.wait()


class ScaledFleet:
    """Stand-in nodes around a core, whose steps are timed."""

    def __init__(self, nodes: int, replicas: int, gateways: int) -> None:
        self._random = random.Random(0)  # noqa: S311 - a load, not a secret
        self._core = SchedulerCore(load({}), HarvestMode.ACTIVE)
        self._nodes, self._replicas, self._gateways = nodes, replicas, gateways
        self.now_s = 1_000.0
        self.cpu_s = 0.0
        self.steps_ms: list[float] = []
        self.published = self.sent = 0
        self.table = b""
        # Epoch and job of each replica's last lease; the nodes send them with their offers.
        self._leases: dict[str, tuple[int, str]] = {}
        self.leased = 0
        # First tokens that a gateway has seen since its last report.
        self._switches: list[pb.Switch] = []
        for job in JOBS:
            for event in (JobRegistered(job, 4), VersionAnnounced(job, 1, 0, "http://trainer")):
                self._core.writes(event)
                self._step(event)

    def attach(self) -> None:
        """Attach all nodes, within one second; then all replicas are leased."""
        for number in range(self._nodes):
            report = pb.NodeReport(node=f"n{number}", hello=hello(number))
            self._step(wire.attached(report, number))

    def play_second(self, revocations: int = 0) -> None:
        """Play one second: each node reports, at a moment of its own; ten ticks."""
        for tick in range(TICKS_A_S):
            for number in range(tick, self._nodes, TICKS_A_S):
                self.now_s += 1.0 / self._nodes
                self._hear(number)
            self._step(Tick(WALL_S + self.now_s))
        for number in range(self._gateways):
            report = demand(f"gw{number}", self._nodes, self._switches)
            self._switches = []
            self._step(wire.demanded(report))
        for _ in range(revocations):
            self._take_back(self._random.randrange(self._nodes))

    def _hear(self, number: int) -> None:
        name = f"n{number}"
        offers = pb.Offers(offers=list(self._offers(number)))
        telemetry = pb.Telemetry(host=host_telemetry(name, self.now_s))
        for report in (
            pb.NodeReport(node=name, offers=offers),
            pb.NodeReport(node=name, telemetry=telemetry),
        ):
            self._receive(report.SerializeToString(), number)

    def _offers(self, number: int) -> Iterator[pb.Offer]:
        for each in range(self._replicas):
            replica = f"n{number}.g{each}"
            epoch, job = self._leases.get(replica, (0, ""))
            yield guest_offer(number, each, epoch, job)

    def _take_back(self, number: int) -> None:
        replica = f"n{number}.g0"
        epoch, _ = self._leases.get(replica, (0, ""))
        revocation = pb.Revocation(replica=replica, epoch=epoch, reason="a burst")
        report = pb.NodeReport(node=f"n{number}", revocation=revocation)
        self._receive(report.SerializeToString(), number)

    def _receive(self, message: bytes, number: int) -> None:
        began_s = time.thread_time()
        event = wire.event_of(pb.NodeReport.FromString(message), number)
        self.cpu_s += time.thread_time() - began_s
        assert event is not None
        self._step(event)

    def _step(self, event: Event) -> None:
        began_s = time.thread_time()
        actions = self._core.step(event, self.now_s)
        sent = self._send(actions)
        took_s = time.thread_time() - began_s
        self.cpu_s += took_s
        self.steps_ms.append(took_s * 1e3)
        for command in sent:
            leases = [command.lease] if command.HasField("lease") else command.renewals.leases
            for lease in leases:
                if self._leases.get(lease.replica, (0, ""))[0] != lease.epoch:
                    new = pb.Switch(replica=lease.replica, epoch=lease.epoch, took_s=SWITCH_S)
                    self._switches.append(new)
                self._leases[lease.replica] = lease.epoch, lease.job
        for action in actions:
            if isinstance(action, Reserve):
                self._step(action.then)
            elif isinstance(action, LogRecord):
                ends = action.event in ("revoked", "lease_expired", "lease_released")
                self.leased += (action.event == "lease_granted") - ends

    def _send(self, actions: list[Action]) -> list[pb.NodeCommand]:
        sent = []
        for action in actions:
            if isinstance(action, Command):
                action.command.SerializeToString()
                sent.append(action.command)
            elif isinstance(action, PublishTable):
                self.published += 1
                for _ in range(self._gateways):
                    self.table = action.table.SerializeToString()
        self.sent += len(sent)
        return sent


def measure(nodes: int, replicas: int, gateways: int, seconds: int) -> dict[str, Any]:
    fleet = ScaledFleet(nodes, replicas, gateways)
    fleet.attach()
    for _ in range(round(WARM_UP_S)):
        fleet.play_second()
    start_cpu_s, fleet.cpu_s = fleet.cpu_s, 0.0
    start_step_ms, fleet.steps_ms = max(fleet.steps_ms), []
    fleet.published = fleet.sent = 0
    # Garbage of the beginning is not the steady state's.
    gc.collect()
    for _ in range(seconds):
        fleet.play_second(nodes // 250)
    began_s = time.perf_counter()
    table = pb.ReplicaTable.FromString(fleet.table)
    table.SerializeToString()
    table_s = time.perf_counter() - began_s
    return {
        "nodes": nodes,
        "replicas": len(table.replicas),
        "leased": fleet.leased,
        "gateways": gateways,
        "sockets": "left out",
        "start_cpu_s": round(start_cpu_s, 2),
        "start_step_max_ms": round(start_step_ms, 1),
        "seconds": seconds,
        "steps": len(fleet.steps_ms),
        "cpu_share": round(fleet.cpu_s / seconds, 3),
        **{f"step_p{100 * q:g}_ms": round(percentile(fleet.steps_ms, q), 3) for q in (0.5, 0.99)},
        "step_max_ms": round(max(fleet.steps_ms), 1),
        "commands_a_s": round(fleet.sent / seconds),
        "tables_a_s": round(fleet.published / seconds, 1),
        "table_bytes": len(fleet.table),
        "first_table_s": round(max(fleet.steps_ms) / 1e3 + table_s, 3),
    }


@dataclass
class LoadTally:
    """Counts of the load process, since `reset`."""

    counts: Counter[str] = field(default_factory=Counter)
    first_tables_s: list[float] = field(default_factory=list)
    leased: int = 0
    table_bytes: int = 0

    def reset(self) -> None:
        self.counts.clear()
        self.first_tables_s.clear()


class LeasedNode(StandInNode):
    """A node that takes leases, names them with its offers, and obeys releases."""

    def __init__(self, address: str, number: int, replicas: int, tally: LoadTally) -> None:
        super().__init__(address, f"n{number}")
        self._number, self._replicas, self._tally = number, replicas, tally
        self._leases: dict[str, pb.Lease] = {}
        self._until_s: dict[str, float] = {}
        self.switches: list[pb.Switch] = []

    async def run(self) -> None:
        """Run until cancelled; a stream that ends is opened again, as a node's is."""
        while True:
            await super().run()
            self._tally.counts["lost_streams"] += 1
            await asyncio.sleep(AGAIN_S)

    def take_back(self) -> None:
        replica = f"{self.name}.g0"
        lease = self._leases.pop(replica, None)
        if lease is not None:
            revocation = pb.Revocation(replica=replica, epoch=lease.epoch, reason="a burst")
            self.due.append(self.report(revocation=revocation))

    def hello(self) -> pb.Hello:
        return hello(self._number)

    async def obey(self, command: pb.NodeCommand) -> None:
        self._tally.counts["commands"] += 1
        match command.WhichOneof("command"):
            case "lease":
                self._take(command.lease)
            case "renewals":
                for lease in command.renewals.leases:
                    self._take(lease)
            case "release":
                release = command.release
                self._leases.pop(release.replica, None)
                done = pb.Released(replica=release.replica, epoch=release.epoch)
                self.due.append(self.report(released=done))

    def _take(self, lease: pb.Lease) -> None:
        self._tally.counts["leases"] += 1
        before = self._leases.get(lease.replica)
        if before is None or before.epoch != lease.epoch:
            switch = pb.Switch(replica=lease.replica, epoch=lease.epoch, took_s=SWITCH_S)
            self.switches.append(switch)
        self._leases[lease.replica] = lease
        self._until_s[lease.replica] = time.monotonic() + lease.ttl_s

    def state(self) -> Iterator[pb.NodeReport]:
        due, self.due = self.due, []
        replicas = range(self._replicas)
        offers = pb.Offers(offers=[self._offer(each) for each in replicas])
        host = host_telemetry(self.name, time.monotonic())
        guests = [
            pb.GuestTelemetry(
                replica=f"{self.name}.g{each}", mode="run", reason="ok", state="healthy", duty=0.6
            )
            for each in replicas
        ]
        telemetry = pb.Telemetry(host=host, guests=guests)
        for report in (*due, self.report(offers=offers), self.report(telemetry=telemetry)):
            self._tally.counts["reports"] += 1
            yield report

    def _offer(self, each: int) -> pb.Offer:
        replica = f"{self.name}.g{each}"
        lease = self._leases.get(replica)
        if lease is None:
            return guest_offer(self._number, each, 0, "")
        left_s = self._until_s[replica] - time.monotonic()
        held = pb.HeldLease(job=lease.job, epoch=lease.epoch, left_s=left_s) if left_s > 0 else None
        return guest_offer(self._number, each, lease.epoch, lease.job, held)


class FleetLoad:
    """All stand-ins of one process."""

    def __init__(self, address: str, nodes: int, replicas: int, gateways: int) -> None:
        self._address, self._gateways = address, gateways
        self._tally = LoadTally()
        self._nodes = [LeasedNode(address, n, replicas, self._tally) for n in range(nodes)]
        self._random = random.Random(0)  # noqa: S311 - a load, not a secret
        self._wanted = nodes * replicas

    async def run(self, seconds: float) -> dict[str, object]:
        """Attach all, wait until all is leased, then count for so long."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._gateway(n)) for n in range(self._gateways)]
            began_s = time.monotonic()
            for at, node in enumerate(self._nodes):
                tasks.append(group.create_task(node.run()))
                if at % (ATTACH_A_S // 10) == 0:
                    await asyncio.sleep(0.1)
            while self._tally.leased < 0.99 * self._wanted:
                if time.monotonic() > began_s + START_S:
                    raise UnavailableError(f"{self._tally.leased} of {self._wanted} leased only")
                await asyncio.sleep(0.1)
            start_s = time.monotonic() - began_s
            bursts = group.create_task(self._bursts())
            await asyncio.sleep(WARM_UP_S)
            lost = self._tally.counts["lost_streams"]
            self._tally.reset()
            say(event="steady", start_s=round(start_s, 1), lost_at_start=lost)
            newcomers = group.create_task(self._newcomers())
            cpu_s = time.process_time()
            await asyncio.sleep(seconds)
            found = self._found(seconds, time.process_time() - cpu_s)
            say(event="done")
            for task in (*tasks, bursts, newcomers):
                task.cancel()
        return found

    def _found(self, seconds: float, cpu_s: float) -> dict[str, object]:
        firsts_s, counts = self._tally.first_tables_s, self._tally.counts
        return {
            "leased": self._tally.leased,
            "reports_a_s": round(counts["reports"] / seconds),
            "commands_a_s": round(counts["commands"] / seconds),
            "leases_told_a_s": round(counts["leases"] / seconds),
            "tables_a_s": round(counts["tables"] / seconds, 1),
            "table_bytes": self._tally.table_bytes,
            "newcomers": len(firsts_s),
            "first_table_p50_s": round(percentile(firsts_s, 0.5), 3),
            "first_table_max_s": round(max(firsts_s), 3),
            "lost_streams": counts["lost_streams"],
            "load_cpu_share": round(cpu_s / seconds, 3),
        }

    async def _gateway(self, number: int) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(f"gw{number}"))
            group.create_task(self._report(f"gw{number}", first=number == 0))

    async def _watch(self, name: str) -> None:
        stub = SchedulerStub(channel_to(self._address))
        ask = pb.WatchReplicasRequest(gateway=name)
        while True:
            with suppress(grpc.aio.AioRpcError):
                async for table in stub.WatchReplicas(ask):
                    self._tally.counts["tables"] += 1
                    self._tally.leased = sum(row.leased for row in table.replicas)
                    self._tally.table_bytes = table.ByteSize()
            self._tally.counts["lost_streams"] += 1
            await asyncio.sleep(AGAIN_S)

    async def _report(self, name: str, *, first: bool) -> None:
        stub = SchedulerStub(channel_to(self._address))
        while True:
            switches: list[pb.Switch] = []
            for node in self._nodes if first else ():
                switches += node.switches
                node.switches = []
            report = demand(name, len(self._nodes), switches[:MOST_SWITCHES])
            with suppress(grpc.aio.AioRpcError):
                await stub.ReportDemand(report)
            await asyncio.sleep(1.0)

    async def _bursts(self) -> None:
        """Take back a replica in a thousand each second."""
        while True:
            for _ in range(max(1, len(self._nodes) // 250)):
                self._random.choice(self._nodes).take_back()
            await asyncio.sleep(1.0)

    async def _newcomers(self) -> None:
        """Start gateways that take their first table and end."""
        while True:
            began_s = time.monotonic()
            channel = channel_to(self._address)
            ask = pb.WatchReplicasRequest(gateway="newcomer")
            call = SchedulerStub(channel).WatchReplicas(ask)
            with suppress(grpc.aio.AioRpcError):
                await call.read()
                self._tally.first_tables_s.append(time.monotonic() - began_s)
            call.cancel()
            await channel.close(None)
            await asyncio.sleep(NEWCOMER_EVERY_S)


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def measure_over_grpc(nodes: int, replicas: int, gateways: int, seconds: int) -> dict[str, Any]:
    """Return figures of one fleet over real connections. EngineStartError where it fails."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    prefix = "rose-scheduler-"
    with tempfile.TemporaryDirectory(prefix=prefix) as name, ProcessFleet(Path(name)) as fleet:
        argv = scheduler_command(port, fleet.folder, "--harvest=ACTIVE")
        scheduler = fleet.add(BenchProcess("scheduler", argv).start())
        _register(address)
        argv = python(
            *("bench.micro.scheduler_scale", f"--address={address}", f"--nodes={nodes}"),
            *(f"--replicas={replicas}", f"--gateways={gateways}", f"--seconds={seconds}"),
        )
        load = fleet.add(BenchProcess("load", argv, piped=True).start())
        steady = load.event("steady")
        before, began_s = scheduler.cpu_use(), time.monotonic()
        load.event("done")
        share, _ = scheduler.cpu_use().share_since(before, time.monotonic() - began_s)
        rss = psutil.Process(scheduler.pid).memory_info().rss
        found = load.event("found")
        events = fleet.folder / "logs" / "events-scheduler.jsonl"
        terms = events.read_text(encoding="utf-8").count('"scheduler_leads"')
    return {
        "nodes": nodes,
        "replicas": nodes * replicas,
        "gateways": gateways,
        "sockets": "gRPC on loopback, a connection a node; the load is a stand-in",
        "start_s": steady["start_s"],
        "lost_streams_at_start": steady["lost_at_start"],
        "seconds": seconds,
        "cpu_share": round(share, 3),
        "rss_mib": rss >> 20,
        "terms": terms,
        **{name: value for name, value in found.items() if name != "event"},
        "first_table_s": found["first_table_max_s"],
    }


def _register(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = SchedulerStub(channel)
        for job in JOBS:
            ask = pb.RegisterJobRequest(job=job, max_staleness=4)
            stub.RegisterJob(ask, timeout=30, wait_for_ready=True)
            version = pb.AnnounceVersionRequest(job=job, version=1, parent=0, url="http://trainer")
            stub.AnnounceVersion(version, timeout=30)


def serve_load(args: argparse.Namespace) -> None:
    """Be the load process of a scheduler at `args.address`."""

    async def loaded() -> dict[str, object]:
        # Channels belong to the loop in which they are made.
        load = FleetLoad(args.address, args.nodes, args.replicas, args.gateways)
        return await load.run(args.seconds)

    try:
        say(event="found", **asyncio.run(loaded()))
    except* UnavailableError as group:
        say(event="failed", message=str(group.exceptions[0]))
    # Its thousand channels have nothing to say any more, and closing each takes its time.
    os._exit(0)


def main() -> int:
    numbers: dict[str, Any] = {"nodes": 1_000, "replicas": 4, "gateways": 4, "seconds": 30}
    parser = parser_of(__doc__, "bench.micro.scheduler_scale", **numbers)
    parser.add_argument("--grpc", action="store_true", help="over real connections")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.address:
        serve_load(args)

    def run() -> int:
        fleet = args.nodes, args.replicas, args.gateways, args.seconds
        row = (measure_over_grpc if args.grpc else measure)(*fleet)
        good = row["cpu_share"] <= MOST_CPU_SHARE and row["first_table_s"] <= MOST_TABLE_S
        return put_judged({"rows": [row]}, args.out, good=good)

    return reported("bench-scheduler", run)


if __name__ == "__main__":
    sys.exit(main())

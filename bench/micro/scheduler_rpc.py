"""Stand-in nodes and gateways around a real scheduler process, over gRPC on loopback.

    scheduler process  <── a connection for each node ──  load process (this module, `--address`)
                       <── 4 gateways: table and demand ──

`measure` starts both and reads the scheduler's CPU time from the kernel; the load process counts
its messages. A stand-in node reports once a second (offers, telemetry), names the leases it holds,
obeys releases, and now and then takes a replica back. No code of a real node runs in it.
"""

import argparse
import asyncio
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
from rose.addresses import free_port
from rose.errors import UnavailableError
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import channel_options
from rose.rpc.rose_pb2_grpc import SchedulerStub
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


def _host(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250}"


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


class StandInNode:
    """One node on a connection of its own."""

    def __init__(self, address: str, number: int, replicas: int, tally: LoadTally) -> None:
        self._number, self._replicas, self._tally = number, replicas, tally
        self.name = f"n{number}"
        self._channel = channel_to(address)
        self._leases: dict[str, pb.Lease] = {}
        self._until_s: dict[str, float] = {}
        self._due: list[pb.NodeReport] = []
        self.switches: list[pb.Switch] = []

    async def run(self) -> None:
        """Run until cancelled; a stream that ends is opened again, as a node's is."""
        while True:
            with suppress(grpc.aio.AioRpcError):
                async for command in SchedulerStub(self._channel).Attach(self._reports()):
                    self._tally.counts["commands"] += 1
                    self._obey(command)
            self._tally.counts["lost_streams"] += 1
            await asyncio.sleep(AGAIN_S)

    def take_back(self) -> None:
        replica = f"{self.name}.g0"
        lease = self._leases.pop(replica, None)
        if lease is not None:
            revocation = pb.Revocation(replica=replica, epoch=lease.epoch, reason="a burst")
            self._due.append(pb.NodeReport(node=self.name, revocation=revocation))

    def _obey(self, command: pb.NodeCommand) -> None:
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
                self._due.append(pb.NodeReport(node=self.name, released=done))

    def _take(self, lease: pb.Lease) -> None:
        self._tally.counts["leases"] += 1
        before = self._leases.get(lease.replica)
        if before is None or before.epoch != lease.epoch:
            switch = pb.Switch(replica=lease.replica, epoch=lease.epoch, took_s=SWITCH_S)
            self.switches.append(switch)
        self._leases[lease.replica] = lease
        self._until_s[lease.replica] = time.monotonic() + lease.ttl_s

    async def _reports(self) -> AsyncIterator[pb.NodeReport]:
        yield pb.NodeReport(node=self.name, hello=hello(self._number))
        next_s = time.monotonic()
        while True:
            due, self._due = self._due, []
            for report in (*due, *self._state()):
                self._tally.counts["reports"] += 1
                yield report
            next_s += 1.0
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    def _state(self) -> Iterator[pb.NodeReport]:
        offers = pb.Offers(offers=[self._offer(each) for each in range(self._replicas)])
        yield pb.NodeReport(node=self.name, offers=offers)
        now = int(time.monotonic() * 10)
        host = pb.HostTelemetry(node=self.name, busy_share=0.3, slo_good=now, slo_bad=1)
        guests = [
            pb.GuestTelemetry(
                replica=f"{self.name}.g{each}", mode="run", reason="ok", state="healthy", duty=0.6
            )
            for each in range(self._replicas)
        ]
        yield pb.NodeReport(node=self.name, telemetry=pb.Telemetry(host=host, guests=guests))

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
        self._nodes = [StandInNode(address, n, replicas, self._tally) for n in range(nodes)]
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
        figures = {"turns": 40 * len(self._nodes), "owed_tokens": 1e9, "made_tok_s": 1e6}
        jobs = [pb.JobDemand(job=job, **figures) for job in JOBS]  # type: ignore[arg-type]
        while True:
            switches: list[pb.Switch] = []
            for node in self._nodes if first else ():
                switches += node.switches
                node.switches = []
            report = pb.DemandReport(gateway=name, jobs=jobs, switches=switches[:MOST_SWITCHES])
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


def channel_to(address: str) -> grpc.aio.Channel:
    """Return a connection that is not shared, as that of a process of its own."""
    options = (*channel_options(), ("grpc.use_local_subchannel_pool", 1))
    return grpc.aio.insecure_channel(address, options=options)


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def measure(
    nodes: int, replicas: int, gateways: int, seconds: int, spy: Path | None = None
) -> dict[str, Any]:
    """Return figures of one fleet over real connections. EngineStartError where it does not start.

    spy: file for py-spy's stacks of the scheduler; it slows the scheduler down.
    """
    port = free_port()
    address = f"127.0.0.1:{port}"
    prefix = "rose-scheduler-"
    with tempfile.TemporaryDirectory(prefix=prefix) as name, ProcessFleet(Path(name)) as fleet:
        argv = scheduler_command(port, fleet.folder, "--harvest=ACTIVE")
        scheduler = fleet.add(BenchProcess("scheduler", argv).start())
        _register(address)
        argv = python(
            *("bench.micro.scheduler_rpc", f"--address={address}", f"--nodes={nodes}"),
            *(f"--replicas={replicas}", f"--gateways={gateways}", f"--seconds={seconds}"),
        )
        load = fleet.add(BenchProcess("load", argv, piped=True).start())
        steady = load.event("steady")
        before, began_s = scheduler.cpu_use(), time.monotonic()
        if spy:
            fleet.add(_spied(scheduler.pid, seconds, spy).start())
        load.event("done")
        share, _ = scheduler.cpu_use().share_since(before, time.monotonic() - began_s)
        rss = psutil.Process(scheduler.pid).memory_info().rss
        if spy:
            fleet.members["py-spy"].popen.wait()
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


def _spied(pid: int, seconds: int, out: Path) -> BenchProcess:
    argv = (
        *("py-spy", "record", "--gil", "--format=raw", "--rate=200"),
        *(f"--pid={pid}", f"--duration={seconds - 5}", f"--output={out}"),
    )
    return BenchProcess("py-spy", argv)


def _register(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = SchedulerStub(channel)
        for job in JOBS:
            ask = pb.RegisterJobRequest(job=job, max_staleness=4)
            stub.RegisterJob(ask, timeout=30, wait_for_ready=True)
            version = pb.AnnounceVersionRequest(job=job, version=1, parent=0, url="http://trainer")
            stub.AnnounceVersion(version, timeout=30)


async def _loaded(args: argparse.Namespace) -> dict[str, object]:
    # Channels belong to the loop in which they are made.
    load = FleetLoad(args.address, args.nodes, args.replicas, args.gateways)
    return await load.run(args.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    for name in ("nodes", "replicas", "gateways", "seconds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    try:
        say(event="found", **asyncio.run(_loaded(args)))
    except* UnavailableError as group:
        say(event="failed", message=str(group.exceptions[0]))
    # Its thousand channels have nothing to say any more, and closing each takes its time.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

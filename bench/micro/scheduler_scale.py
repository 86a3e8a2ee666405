"""Number of nodes that one scheduler carries.

    python -m bench.micro.scheduler_scale [--grpc] [--nodes N] [--replicas N] [--seconds S]

Prints one JSON object. Stand-in nodes attach, report offers and telemetry once a second each, obey
leases, and some take a replica back every second; gateways report their demand. Their messages go
through `rose.scheduler.wire` into `SchedulerCore.step`, and whatever it sends is serialised, as in
the scheduler's process; sockets are left out, so gRPC's own time per message is not in the figures.
Time is the load's: `cpu_share` is CPU seconds that the scheduler needs for each of its seconds.

`start_cpu_s` is what it takes until all nodes have attached and all replicas are leased. A new
gateway gets the newest table as soon as the step that runs is done: `first_table_s` is the longest
step with the time to serialise and read a table.

`--grpc` plays the same fleet over real connections into a real scheduler process
(`bench.micro.scheduler_rpc`): there `cpu_share` is the process's, as the kernel counts it, and
`first_table_s` the longest wait of a gateway that was new.

Exit code 1 when `cpu_share` or `first_table_s` is above its target.
"""

import gc
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common.report import machine, parser_of, put, reported
from bench.micro import scheduler_rpc
from bench.micro.scheduler_rpc import JOBS, SWITCH_S, guest_offer, hello
from elastic_scheduler import HarvestMode
from rose.rpc import rose_pb2 as pb
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

TICKS_A_S = 10
WARM_UP_S = 15
MOST_CPU_SHARE = 0.5
MOST_TABLE_S = 1.0
WALL_S = 1.7e9


class ScaledFleet:
    """Stand-in nodes around a core, whose steps are timed."""

    def __init__(
        self,
        nodes: int,
        replicas: int,
        gateways: int,
        seed: int = 0,
    ) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a load, not a secret
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
            jobs = [
                pb.JobDemand(job=job, turns=40 * self._nodes, owed_tokens=1e9, made_tok_s=1e6)
                for job in JOBS
            ]
            report = pb.DemandReport(gateway=f"gw{number}", jobs=jobs, switches=self._switches)
            self._switches = []
            self._step(wire.demanded(report))
        for _ in range(revocations):
            self._take_back(self._random.randrange(self._nodes))

    def _hear(self, number: int) -> None:
        offers = pb.NodeReport(
            node=f"n{number}", offers=pb.Offers(offers=list(self._offers(number)))
        )
        host = pb.HostTelemetry(
            node=f"n{number}", busy_share=0.3, slo_good=int(self.now_s * 10), slo_bad=1
        )
        telemetry = pb.NodeReport(node=f"n{number}", telemetry=pb.Telemetry(host=host))
        for report in (offers, telemetry):
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
    for _ in range(WARM_UP_S):
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


def main() -> int:
    parser = parser_of(__doc__, "bench.micro.scheduler_scale")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--replicas", type=int, default=4, help="of each node")
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grpc", action="store_true", help="over real connections")
    parser.add_argument("--spy", type=Path, metavar="FILE", help="with --grpc: py-spy's raw stacks")
    args = parser.parse_args()

    def run() -> int:
        fleet = args.nodes, args.replicas, args.gateways, args.seconds
        row = scheduler_rpc.measure(*fleet, args.spy) if args.grpc else measure(*fleet)
        put({"rows": [row], "machine": machine()}, args.out)
        return int(row["cpu_share"] > MOST_CPU_SHARE or row["first_table_s"] > MOST_TABLE_S)

    return reported("bench-scheduler", run)


if __name__ == "__main__":
    sys.exit(main())

"""Time that `rose stop-all` takes over a fleet with silent nodes.

    python -m bench.micro.stop_all [--nodes N] [--silent N] [--rounds N] [--out FILE]

Prints one JSON object. A scheduler process, and stand-in nodes on connections of their own, each
with a guest that works. In each round some of the nodes fall silent, their streams open; then
`rose stop-all` is run as an operator runs it. A node that speaks confirms a stop when it reads it,
and its guest is gone up to a second later, as turns are handed back. Exit code 1 when a stop took
longer than `reclaimDeadline`, a node that speaks was not counted as held, or the silent ones were
not the ones that are named.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.common.processes import BenchProcess, scheduler_command
from bench.common.report import parser_of, put_judged
from bench.micro.scheduler_scale import StandInNode, channel_to
from rose.addresses import free_port
from rose.cli.exit_codes import ExitCode
from rose.errors import UnavailableError
from rose.rpc import rose_pb2 as pb
from rose.rpc.rose_pb2_grpc import SchedulerStub

DEADLINE_S = 5.0
POLICY = {"name": "all", "mode": "Active", "reclaimDeadline": f"{DEADLINE_S:g}s"}
REPORT_S = 0.5
# Handing turns back takes up to this.
MOST_END_S = 1.0
PATIENCE_S = 60.0
LOOK_S = 0.05


class StopRound(msgspec.Struct, frozen=True):
    """One `rose stop-all`: its answer, and the time of the whole command."""

    nodes: int
    silent: int
    held: int
    slowest_ms: float
    took_s: float
    command_s: float
    exit_code: int
    named: bool
    in_time: bool

    @property
    def good(self) -> bool:
        """True if it was in time and named the silent nodes alone."""
        counted = self.held == self.nodes - self.silent
        code = ExitCode.UNPROVED if self.silent else ExitCode.DONE
        return self.in_time and self.named and counted and self.exit_code == code


class StoppableNode(StandInNode):
    """A node whose guest works until its stop. Unless it `speaks`, it reads nothing."""

    report_s = REPORT_S

    def __init__(self, address: str, number: int, dice: random.Random) -> None:
        super().__init__(address, f"n{number:03}")
        self._guest = f"guest-{number:03}"
        self._dice = dice
        self.speaks = asyncio.Event()
        self.speaks.set()
        self._gone_s: float | None = None

    def hello(self) -> pb.Hello:
        return pb.Hello(protocol=2, obeys=True, takes_caps=True)

    async def obey(self, command: pb.NodeCommand) -> None:
        await self.speaks.wait()
        if not command.HasField("harvest"):
            return
        harvest = command.harvest
        stopped = harvest.mode == pb.HARVEST_MODE_OFF
        if stopped and self._gone_s is None:
            self._gone_s = time.monotonic() + self._dice.uniform(0.0, MOST_END_S)
        elif not stopped:
            self._gone_s = None
        if harvest.order:
            self.due.append(self.report(obeyed=pb.Obeyed(order=harvest.order)))
        self.wake()

    def state(self) -> Iterator[pb.NodeReport]:
        if not self.speaks.is_set():
            return
        due, self.due = self.due, []
        yield from due
        offer = pb.Offer(
            replica=self._guest, kind=pb.REPLICA_KIND_GUEST, url="http://127.0.0.1:9", ttl_s=3.0
        )
        yield self.report(offers=pb.Offers(offers=[offer]))
        gone = self._gone_s is not None and time.monotonic() > self._gone_s
        guest = pb.GuestTelemetry(
            replica=self._guest,
            state="stopped" if gone else "healthy",
            duty=0.0 if gone else 0.6,
            held_bytes=None if self._gone_s is None else 0 if gone else 8 << 30,
        )
        yield self.report(telemetry=pb.Telemetry(guests=[guest]))


@asynccontextmanager
async def stoppable_fleet(
    nodes: int, folder: Path, dice: random.Random
) -> AsyncIterator[tuple[str, Any, list[StoppableNode]]]:
    """Run a scheduler and nodes whose guests work; give its address, its stub, and the nodes.

    Raises UnavailableError where the scheduler or the fleet fails.
    """
    port = free_port()
    address = f"127.0.0.1:{port}"
    scheduler = BenchProcess("scheduler", scheduler_command(port, folder)).start()
    tasks: list[asyncio.Task[None]] = []
    try:
        stub = SchedulerStub(channel_to(address))
        apply = pb.ApplyPolicyRequest(policy=json.dumps(POLICY))
        await stub.ApplyPolicy(apply, timeout=PATIENCE_S, wait_for_ready=True)
        fleet = [StoppableNode(address, number, dice) for number in range(nodes)]
        tasks = [asyncio.create_task(node.run()) for node in fleet]
        await at_work(stub, nodes)
        yield address, stub, fleet
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(scheduler.end)


async def measure(nodes: int, silent: int, rounds: int, folder: Path) -> list[StopRound]:
    """Return a row for each round. Raises UnavailableError where the fleet fails."""
    dice = random.Random(0)  # noqa: S311 - a load, not a secret
    rows = []
    async with stoppable_fleet(nodes, folder, dice) as (address, stub, fleet):
        for _ in range(rounds):
            await at_work(stub, nodes)
            mute = dice.sample(fleet, silent)
            for node in mute:
                node.speaks.clear()
            rows.append(await _stopped(address, nodes, {node.name for node in mute}))
            for node in mute:
                node.speaks.set()
            resume = pb.SetHarvestRequest(mode=pb.HARVEST_MODE_ACTIVE, stop_alone=True)
            await stub.SetHarvest(resume, timeout=PATIENCE_S)
    return rows


async def at_work(stub: Any, nodes: int) -> None:  # noqa: ANN401 - of gRPC
    """Return once every node is attached, has confirmed its mode, and has a guest that works."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        now = await stub.Snapshot(pb.SnapshotRequest(), timeout=PATIENCE_S)
        ready = [node for node in now.nodes if node.HasField("obeyed_s")]
        if len(ready) == nodes and sum(each.state == "healthy" for each in now.guests) == nodes:
            return
        if time.monotonic() > until_s:
            raise UnavailableError(f"{len(ready)} of {nodes} nodes are at work only")
        await asyncio.sleep(LOOK_S)


async def _stopped(address: str, nodes: int, silent: set[str]) -> StopRound:
    words = ("-m", "rose.cli", "stop-all", "-o", "json", "--scheduler", address)
    began_s = time.monotonic()
    run = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await run.communicate()
    command_s = time.monotonic() - began_s
    answer = json.loads(out)
    return StopRound(
        nodes=nodes,
        silent=len(silent),
        held=answer["held"],
        slowest_ms=round(1e3 * (answer["slowest_s"] or 0.0), 1),
        took_s=answer["took_s"],
        command_s=round(command_s, 3),
        exit_code=run.returncode or 0,
        named={each["node"] for each in answer["unheard"]} == silent,
        in_time=answer["took_s"] <= DEADLINE_S,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a stop was not in time."""
    parser = parser_of(__doc__, "bench.micro.stop_all", nodes=100, silent=3, rounds=5)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rose-stop-") as folder:
        rows = asyncio.run(measure(args.nodes, args.silent, args.rounds, Path(folder)))
    good = all(row.good for row in rows)
    found = {"reclaim_deadline_s": DEADLINE_S, "good": good, "rounds": rows}
    return put_judged(found, args.out, good=good)


if __name__ == "__main__":
    sys.exit(main())

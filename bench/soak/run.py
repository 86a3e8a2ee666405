"""One soak: a gateway process, engines that fail on request, callers, observations and bounds."""

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import psutil

from bench.common.checks import Check, at_most
from bench.common.processes import BenchProcess, cores, python
from bench.load.caller import HttpAnswer, HttpCaller
from bench.soak.callers import GENERATE, Asker, SoakWay
from rose.addresses import free_ports
from rose.gateway.event_loop import WINDOW_S
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server


class LeasingScheduler(SchedulerServicer):
    """Scheduler that ends a replica's lease, and grants a new one, every `renew_s`; 0: never."""

    def __init__(self, ports: Sequence[int], renew_s: float = 0.0) -> None:
        self._epochs = dict.fromkeys(ports, 1)
        self.renew_s = renew_s
        self.renewed = 0
        self._server = make_server()
        add_SchedulerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> "LeasingScheduler":
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.stop(0.1)

    async def WatchReplicas(  # noqa: N802 - gRPC's name
        self,
        request: Any,  # noqa: ANN401 - pb.WatchReplicasRequest
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.ReplicaTable]:
        """Yield tables until the gateway hangs up."""
        del request, context
        while True:
            yield self._table()
            await asyncio.sleep(self.renew_s or 1.0)
            if self.renew_s:
                port = list(self._epochs)[self.renewed % len(self._epochs)]
                self._epochs[port] += 1
                self.renewed += 1

    async def ReportDemand(  # noqa: N802 - gRPC's name
        self, request: pb.DemandReport, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DemandReply:
        del request, context
        return pb.DemandReply()

    def _table(self) -> pb.ReplicaTable:
        rows = [
            pb.Replica(
                id=f"own-{port}",
                kind=pb.REPLICA_KIND_DEDICATED,
                url=f"http://127.0.0.1:{port}",
                leased=True,
                lease_epoch=epoch,
                healthy=True,
                max_sequences=64,
                decode_tok_s=100_000.0,
                prefill_tok_s=1_000_000.0,
            )
            for port, epoch in self._epochs.items()
        ]
        return pb.ReplicaTable(replicas=rows)


ENGINE_PORTS = 16
RENEW_S = 0.25
SAMPLE_S = 0.5
MIB = 1 << 20
PROBE_TOKENS = 20_000
# No way takes nearly as long.
ANSWER_S = 20.0
NEVER = -1


@dataclass
class SoakSeen:
    """Observations of one phase. `loop_lag_s`: the gateway's event loop was late by this at worst.

    `loop_busy_s` is the same where the loop had the processor all the while, `waited` the share of
    the time for which the gateway was ready to run and others ran. `silence_s` is the longest time
    without a token of a live stream, `health_s` that of an answer to `/health`: as this process saw
    them, which has to run for that.
    """

    turns: int = 0
    took_s: float = 0.0
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)
    rss_mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    loop_lag_s: float = 0.0
    loop_busy_s: float = 0.0
    waited: float = 0.0
    silence_s: float = 0.0
    health_s: float = 0.0
    renewed: int = 0

    def note(self, way: SoakWay, status: int, body: bytes) -> None:
        self.turns += way.turns
        self.statuses.setdefault(way.name, Counter())[status] += 1
        if status not in way.statuses:
            self.wrong[f"{way.name}: {status} {body[-160:].decode('utf-8', 'replace')}"] += 1


class Soak:
    """A gateway that is up, its scheduler, and callers that keep it busy."""

    def __init__(self, url: str, gateway: int, scheduler: LeasingScheduler) -> None:
        self._url, self._gateway, self._scheduler = url, gateway, scheduler
        self._process = psutil.Process(gateway)
        self._numbers = itertools.count()

    async def phase(
        self, ways: Sequence[SoakWay], in_flight: int, turns: int, seconds: float, seed: int
    ) -> SoakSeen:
        """Ask for `turns`, for `seconds` at most, once the gateway is done with the last phase."""
        await asyncio.sleep(WINDOW_S + 1)
        seen, began_s, waited_s = SoakSeen(), time.monotonic(), _waited_s(self._gateway)
        until_s = began_s + seconds
        watching = [
            asyncio.create_task(each)
            for each in (
                self._sample(seen),
                self._lags(seen),
                self._probe(seen),
                self._health(seen),
            )
        ]

        async def work(number: int) -> None:
            asker = Asker(self._url, random.Random(f"{seed}/{number}"))  # noqa: S311
            shares = [way.share for way in ways]
            while seen.turns < turns and time.monotonic() < until_s:
                way = asker.dice.choices(ways, shares)[0]
                try:
                    async with asyncio.timeout(ANSWER_S):
                        answer = await way.go(asker, next(self._numbers))
                except TimeoutError:
                    asker.close()
                    answer = HttpAnswer(NEVER, b"no answer")
                seen.note(way, *answer)
            asker.close()

        before = self._scheduler.renewed
        try:
            await asyncio.gather(*(work(number) for number in range(in_flight)))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        seen.took_s = time.monotonic() - began_s
        seen.waited = (_waited_s(self._gateway) - waited_s) / seen.took_s
        seen.renewed = self._scheduler.renewed - before
        return seen

    def renewing(self, renew_s: float) -> None:
        """Let leases end every so often from now on."""
        self._scheduler.renew_s = renew_s

    async def _sample(self, seen: SoakSeen) -> None:
        while True:
            seen.rss_mib.append(self._process.memory_info().rss / MIB)
            seen.descriptors.append(self._process.num_fds())
            await asyncio.sleep(SAMPLE_S)

    async def _lags(self, seen: SoakSeen) -> None:
        """Ask the gateway itself, often enough to miss none of its seconds."""
        caller = HttpCaller(self._url)
        try:
            while True:
                stats = json.loads((await caller.get("/rose/v1/stats")).body)
                seen.loop_lag_s = max(seen.loop_lag_s, stats["loop_lag_max_s"])
                seen.loop_busy_s = max(seen.loop_busy_s, stats["loop_busy_max_s"])
                await asyncio.sleep(WINDOW_S / 5)
        finally:
            caller.hang_up()

    async def _probe(self, seen: SoakSeen) -> None:
        """Follow a stream that never ends, by asking for the next one before long."""
        last_s = time.monotonic()

        def received(data: bytes, now_s: float) -> None:
            nonlocal last_s
            silence_s, last_s = now_s - last_s, now_s
            seen.silence_s = max(seen.silence_s, silence_s)

        caller = HttpCaller(self._url, received)
        try:
            for number in itertools.count():
                name, sampling = f"probe-{id(seen)}-{number}", {"max_tokens": PROBE_TOKENS}
                asked = {"request_id": name, "token_ids": [1], "sampling_params": sampling}
                await caller.post(GENERATE, json.dumps({**asked, "stream": True}).encode())
        finally:
            caller.hang_up()

    async def _health(self, seen: SoakSeen) -> None:
        caller = HttpCaller(self._url)
        try:
            while True:
                asked_s = time.monotonic()
                await caller.get("/health")
                seen.health_s = max(seen.health_s, time.monotonic() - asked_s)
                await asyncio.sleep(0.05)
        finally:
            caller.hang_up()


def _waited_s(pid: int) -> float:
    """Return seconds that the process's first thread, the event loop's, was ready and not run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


@asynccontextmanager
async def soaking(folder: Path) -> AsyncIterator[Soak]:
    """Run everything that is needed, in processes of its own but for the scheduler.

    The gateway has a core of its own where there are two: the rest must not be what holds it up.
    """
    *ports, gateway_port = free_ports(ENGINE_PORTS + 1)
    places, url = cores(), f"http://127.0.0.1:{gateway_port}"
    with suppress(OSError):
        os.sched_setaffinity(0, places["generator"])
    argv = python("bench.soak.engine", *ports)
    log = folder / "engine.log"
    with BenchProcess("engine", argv, log, places["engine"], piped=True) as engine:
        engine.read()
        async with LeasingScheduler(ports) as scheduler:  # type: ignore[abstract]
            argv = python(
                *("rose.main.gateway", f"--port={gateway_port}", "--max-waiting=4096"),
                *(f"--scheduler=127.0.0.1:{scheduler.port}", "--answers-kept=1024"),
                *("--resume-grace-s=1", "--version-wait-s=0.2"),
            )
            gateway = BenchProcess("gateway", argv, folder / "gateway.log", places["router"])
            try:
                gateway.start()
                await asyncio.to_thread(gateway.wait_answers, f"{url}/health", len(ports))
                yield Soak(url, gateway.pid, scheduler)
            finally:
                await asyncio.to_thread(gateway.end)


# Over the second half of the turns: from the median of its first part to that of its last.
GROWTH_MIB = 12.0
MEMORY_PARTS = 10
# Connections come and go: of 200,000 turns the medians of thirds differ by 9 with no leak at all
# (one standard deviation, from the samples' spread of 22 and their correlation). This is one
# descriptor that stays in 1,700 turns.
GROWTH_DESCRIPTORS = 40
DESCRIPTOR_PARTS = 3
# Answers that their way does not explain, of all turns.
WRONG = 0
PAUSE_S = 0.1
STORM_RSS_MIB = 300.0
# With more, others on the machine held the gateway up: how late it was says nothing about it.
QUIET_WAITED = 0.02


def checks(mixed: SoakSeen, storm: SoakSeen) -> list[Check]:
    memory, descriptors = mixed.rss_mib, mixed.descriptors
    found = [
        at_most("turns answered otherwise than provoked", sum(mixed.wrong.values()), WRONG),
        at_most(
            "growth of memory over the second half, MiB", growth(memory, MEMORY_PARTS), GROWTH_MIB
        ),
        at_most("growth of descriptors", growth(descriptors, DESCRIPTOR_PARTS), GROWTH_DESCRIPTORS),
        *pauses("", mixed),
    ]
    if not storm.turns:
        return found
    rate = f"{storm.turns / storm.took_s:.0f} time-outs/s: "
    return [
        *found,
        at_most(f"{rate}answered otherwise", sum(storm.wrong.values()), WRONG),
        *pauses(rate, storm),
        at_most(f"{rate}memory, MiB", max(storm.rss_mib), STORM_RSS_MIB),
    ]


def pauses(when: str, seen: SoakSeen) -> list[Check]:
    """Judge the time for which the gateway's loop kept all streams waiting, by its own probe.

    The time that the loop worked is its own doing on any machine. All of a lag is so only where no
    other process had the processor meanwhile.
    """
    step, pause = (
        f"{when}longest step of its event loop, s",
        f"{when}longest pause of its event loop, s",
    )
    quiet = seen.waited <= QUIET_WAITED
    return [
        at_most(step, seen.loop_busy_s, PAUSE_S),
        at_most(pause, seen.loop_lag_s, PAUSE_S, decisive=quiet),
    ]


def growth(samples: list[float] | list[int], parts: int) -> float:
    """Return the growth from the first of so many parts of the second half to the last."""
    half = samples[len(samples) // 2 :]
    part = max(1, len(half) // parts)
    return median(half[-part:]) - median(half[:part])

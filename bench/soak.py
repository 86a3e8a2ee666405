"""`python -m bench.soak`: turns that end in every way, then a storm of ones that time out.

--turns of all ways, for --seconds at most, then the storm for --storm-s.

Writes soak.json and soak.txt. Exit code 0, 1 when a bound is broken, 2 for bad input.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import grpc
import psutil
import uvloop

from bench.common.checks import FAILS, Check, at_most, checks_table, row_verdict
from bench.common.processes import BenchProcess, cores, python
from bench.common.report import OUT, parser_of, put_both, reported, say
from bench.load.streams import HUNG_UP, HttpAnswer, HttpCaller
from rose.addresses import free_ports
from rose.errors import ConfigError
from rose.gateway.event_loop import WINDOW_S
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server

PROG = "bench.soak"
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
TOKENS, LONG = 16, 100_000
# Names come again, as those of trajectories do: what is kept by name is bounded, and full early.
SESSIONS, GROUPS = 256, 256
# Turns of one request of the storm: asking must not cost more than timing out does.
STORM_SAMPLES = 4
ENGINE_PORTS = 16
RENEW_S = 0.25
SAMPLE_S = 0.5
MIB = 1 << 20
PROBE_TOKENS = 20_000
# No way takes nearly as long.
ANSWER_S = 20.0
NEVER = -1
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


class Asker:
    """One caller; `other` is the connection of requests beside its turns."""

    def __init__(self, url: str, dice: random.Random) -> None:
        self.turns, self.other, self.dice = HttpCaller(url), HttpCaller(url), dice

    def body(self, name: str, number: int, max_tokens: int = TOKENS, **fields: Any) -> bytes:  # noqa: ANN401 - JSON
        """Return one request; `name` tells the engine how it ends."""
        dice = self.dice
        sampling = {"max_tokens": max_tokens, "logprobs": 0, **fields.pop("sampling", {})}
        asked = {
            "request_id": f"{name}-{number}",
            "session_id": f"s{dice.randrange(SESSIONS)}",
            "token_ids": [dice.randrange(90) for _ in range(32)],
            "sampling_params": sampling,
        }
        return json.dumps({**asked, **fields}).encode()

    async def ask(self, asked: bytes, **how: Any) -> HttpAnswer:  # noqa: ANN401 - as HttpCaller.ask
        return await self.turns.post(GENERATE, asked, **how)

    def close(self) -> None:
        self.turns.hang_up()
        self.other.hang_up()


@dataclass(frozen=True, slots=True)
class SoakWay:
    """One way: a `share` of all requests, in parts of the sum; any of `statuses` is right.

    One request is `turns` turns.
    """

    name: str
    share: float
    statuses: tuple[int, ...]
    go: "Go"
    turns: int = 1


Go = Callable[[Asker, int], Awaitable[HttpAnswer]]


def _plain(
    name: str,
    tokens: int = TOKENS,
    how: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,  # noqa: ANN401 - JSON
) -> Go:
    """Return the way of one request; `how`: as HttpCaller.ask."""

    async def go(asker: Asker, number: int) -> HttpAnswer:
        return await asker.ask(asker.body(name, number, tokens, **fields), **how)

    return go


def _late(**fields: Any) -> Go:  # noqa: ANN401 - JSON
    return _plain("late", LONG, timeout_s=0.005, **fields)


AFTER_S, AT_TOKENS = {"hang_up_after_s": 0.005}, {"hang_up_at": b"data: "}


async def _resumed(asker: Asker, number: int) -> HttpAnswer:
    asked = asker.body("resumed", number, 64, stream=True)
    await asker.ask(asked, hang_up_at=b"data: ")
    return await asker.ask(asked)


async def _twice(asker: Asker, number: int) -> HttpAnswer:
    asked = asker.body("twice", number)
    await asker.ask(asked)
    return await asker.ask(asked)


async def _aborted(asker: Asker, number: int) -> HttpAnswer:
    turn = asyncio.ensure_future(asker.ask(asker.body("aborted", number, LONG)))
    names = json.dumps({"request_ids": [f"aborted-{number}"]}).encode()
    done: set[asyncio.Future[HttpAnswer]] = set()
    while not done:
        done, _ = await asyncio.wait({turn}, timeout=0.02)
        # Until it is known there: the other connection may be read first.
        await asker.other.post(ABORT, names)
    return turn.result()


async def _group(asker: Asker, number: int) -> HttpAnswer:
    group = {"group_id": f"g{number % GROUPS}", "group_size": 2, "hedges": 1}
    return await asker.ask(asker.body("group", number, 64, sampling={"n": 2}, **group))


WAYS = (
    SoakWay("whole", 36, (200,), _plain("whole")),
    SoakWay("streamed", 18, (200,), _plain("streamed", stream=True)),
    SoakWay("samples", 2, (200,), _plain("samples", sampling={"n": 3}), turns=3),
    SoakWay("group with copies", 1, (200,), _group, turns=2),
    SoakWay("asked again", 2, (200,), _twice),
    SoakWay("left and resumed", 1, (200,), _resumed),
    SoakWay("deadline", 12, (504,), _late()),
    # 200 where tokens were streamed before.
    SoakWay("deadline, streamed", 6, (504, 200), _late(stream=True)),
    SoakWay("caller hangs up", 8, (HUNG_UP,), _plain("left", LONG, AFTER_S)),
    SoakWay(
        "caller hangs up, streamed", 6, (HUNG_UP,), _plain("left", LONG, AT_TOKENS, stream=True)
    ),
    SoakWay("aborted", 2, (409,), _aborted),
    SoakWay("version never comes", 1, (409,), _plain("version", min_version=9)),
    SoakWay("bad input", 3, (400,), _plain("bad", sampling={"temperature": -1})),
    SoakWay("refused by replica", 1, (400,), _plain("refused")),
    # A replica that failed rests for half a second: more of these, and none were left.
    SoakWay("revoked by replica", 0.15, (200,), _plain("revoked")),
    SoakWay("revoked again and again", 0.05, (200,), _plain("revoked_again")),
    SoakWay("replica drains", 0.15, (200,), _plain("draining")),
    SoakWay("replica answers 500", 0.1, (200,), _plain("faulty")),
    SoakWay("replica dies", 0.1, (200,), _plain("dies")),
    SoakWay("replica talks nonsense", 0.1, (200,), _plain("garbage")),
    SoakWay("replica goes silent", 0.1, (200,), _plain("silent")),
    SoakWay("all replicas fail", 0.02, (503,), _plain("failing")),
)
# The storm's only way.
LATE = SoakWay("deadline", 1, (504,), _late(sampling={"n": STORM_SAMPLES}), turns=STORM_SAMPLES)


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


@contextmanager
def calling(
    url: str, on_body: Callable[[bytes, float], None] | None = None
) -> Iterator[HttpCaller]:
    """Give a connection, closed at the end."""
    caller = HttpCaller(url, on_body)
    try:
        yield caller
    finally:
        caller.hang_up()


class Soak:
    """A gateway that is up, its scheduler, and callers that keep it busy."""

    def __init__(self, url: str, gateway: int, scheduler: LeasingScheduler) -> None:
        self._url, self._gateway, self.scheduler = url, gateway, scheduler
        self._process = psutil.Process(gateway)
        self._numbers = itertools.count()

    async def phase(
        self, ways: Sequence[SoakWay], in_flight: int, turns: int, seconds: float, seed: int
    ) -> SoakSeen:
        """Ask for `turns`, for `seconds` at most, once the gateway is done with the last phase."""
        await asyncio.sleep(WINDOW_S + 1)
        seen, began_s, waited_s = SoakSeen(), time.monotonic(), _waited_s(self._gateway)
        until_s = began_s + seconds
        watches = (self._sample, self._lags, self._probe, self._health)
        watching = [asyncio.create_task(watch(seen)) for watch in watches]

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

        before = self.scheduler.renewed
        try:
            await asyncio.gather(*(work(number) for number in range(in_flight)))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        seen.took_s = time.monotonic() - began_s
        seen.waited = (_waited_s(self._gateway) - waited_s) / seen.took_s
        seen.renewed = self.scheduler.renewed - before
        return seen

    async def _sample(self, seen: SoakSeen) -> None:
        while True:
            seen.rss_mib.append(self._process.memory_info().rss / MIB)
            seen.descriptors.append(self._process.num_fds())
            await asyncio.sleep(SAMPLE_S)

    async def _lags(self, seen: SoakSeen) -> None:
        """Ask the gateway itself, often enough to miss none of its seconds."""
        with calling(self._url) as caller:
            while True:
                stats = json.loads((await caller.get("/rose/v1/stats")).body)
                seen.loop_lag_s = max(seen.loop_lag_s, stats["loop_lag_max_s"])
                seen.loop_busy_s = max(seen.loop_busy_s, stats["loop_busy_max_s"])
                await asyncio.sleep(WINDOW_S / 5)

    async def _probe(self, seen: SoakSeen) -> None:
        """Follow a stream that never ends, by asking for the next one before long."""
        last_s = time.monotonic()

        def received(data: bytes, now_s: float) -> None:
            nonlocal last_s
            silence_s, last_s = now_s - last_s, now_s
            seen.silence_s = max(seen.silence_s, silence_s)

        with calling(self._url, received) as caller:
            for number in itertools.count():
                name, sampling = f"probe-{id(seen)}-{number}", {"max_tokens": PROBE_TOKENS}
                asked = {"request_id": name, "token_ids": [1], "sampling_params": sampling}
                await caller.post(GENERATE, json.dumps({**asked, "stream": True}).encode())

    async def _health(self, seen: SoakSeen) -> None:
        with calling(self._url) as caller:
            while True:
                asked_s = time.monotonic()
                await caller.get("/health")
                seen.health_s = max(seen.health_s, time.monotonic() - asked_s)
                await asyncio.sleep(0.05)


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
    argv = python("bench.load.standin", *(f"f{port}" for port in ports))
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
    step, pause = (f"{when}longest {what} of its event loop, s" for what in ("step", "pause"))
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


progress = partial(say, "soak")


def main(argv: Sequence[str] | None = None) -> int:
    numbers: dict[str, float] = {"turns": 200_000, "seconds": 540.0, "storm_s": 60.0}
    args = parser_of(__doc__, PROG, OUT, **numbers, in_flight=32, seed=0).parse_args(argv)
    try:
        return reported(PROG, lambda: _run(args))
    except asyncio.CancelledError:
        progress("ended by a signal")
        return 128 + signal.SIGTERM


def _run(args: argparse.Namespace) -> int:
    if args.turns < 1 or args.in_flight < 1 or args.storm_s < 0:
        raise ConfigError("--turns, --in-flight: at least 1, --storm-s: at least 0")
    folder = args.out / "soak"
    folder.mkdir(parents=True, exist_ok=True)
    mixed, storm = uvloop.run(soak(folder, args))
    judged = checks(mixed, storm)
    result = {"mixed": mixed, "storm": storm, "checks": judged}
    put_both(args.out, "soak", result, table(mixed, storm, judged))
    return int(row_verdict(judged) == FAILS)


async def soak(folder: Path, args: argparse.Namespace) -> tuple[SoakSeen, SoakSeen]:
    """Run both phases on one gateway. A SIGTERM cancels it, which ends all processes."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with soaking(folder) as running:
        running.scheduler.renew_s = RENEW_S
        progressing = asyncio.create_task(_minutes())
        mixed = await running.phase(WAYS, args.in_flight, args.turns, args.seconds, args.seed)
        progressing.cancel()
        running.scheduler.renew_s = 0.0
        storm = await running.phase([LATE], args.in_flight, sys.maxsize, args.storm_s, args.seed)
    return mixed, storm


def table(mixed: SoakSeen, storm: SoakSeen, judged: Sequence[Check]) -> str:
    """Lay out the answers of each way, other observations, and all bounds."""
    lines = [f"{'way':>26}  {'asked':>7}  answers (0: the caller hung up)"]
    for name, statuses in mixed.statuses.items():
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
        lines.append(f"{name:>26}  {sum(statuses.values()):>7}  {answers}")
    lines += [
        f"{'WRONG':>26}  {count:>7}  {answers}" for answers, count in mixed.wrong.most_common(8)
    ]
    lines.append("")
    for name, seen in (("mixed", mixed), ("storm", storm)):
        if seen.turns:
            lines.append(
                f"{name}: {seen.turns} turns in {seen.took_s:.0f} s; as seen from outside, a live"
                f" stream was silent for {1e3 * seen.silence_s:.0f} ms, /health took"
                f" {1e3 * seen.health_s:.0f} ms; for {seen.waited:.0%} of the time the gateway"
                " waited for a processor"
            )
    return "\n".join([*lines, "", checks_table(judged, ".3f")])


async def _minutes() -> None:
    for minute in range(1, 60):
        await asyncio.sleep(60)
        progress(f"{minute} min")


if __name__ == "__main__":
    sys.exit(main())

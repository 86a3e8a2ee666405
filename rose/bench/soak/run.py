"""One soak: a gateway process, engines that fail when told to, callers, and what was seen."""

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rose.addresses import free_ports
from rose.bench.gateway.processes import Measured, cores
from rose.bench.soak.caller import Answer, Caller
from rose.bench.soak.scheduler import LeasingScheduler
from rose.bench.soak.ways import GENERATE, Asker, Way
from rose.gateway.event_loop import WINDOW_S

ENGINE_PORTS = 16
RENEW_S = 0.25
SAMPLE_S = 0.5
MIB = 1 << 20
PROBE_TOKENS = 20_000
# No way takes nearly as long.
ANSWER_S = 20.0
NEVER = -1


@dataclass
class Seen:
    """What one phase showed. `loop_lag_s`: by how much the gateway's event loop was late at worst.

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

    def note(self, way: Way, status: int, body: bytes) -> None:
        """One request is over."""
        self.turns += way.turns
        self.statuses.setdefault(way.name, Counter())[status] += 1
        if status not in way.statuses:
            self.wrong[f"{way.name}: {status} {body[-160:].decode('utf-8', 'replace')}"] += 1


class Soak:
    """A gateway that is up, its scheduler, and callers that keep it busy."""

    def __init__(self, port: int, gateway: int, scheduler: LeasingScheduler) -> None:
        """`gateway`: its process id."""
        self._port, self._gateway, self._scheduler = port, gateway, scheduler
        self._process = psutil.Process(gateway)
        self._numbers = itertools.count()

    async def phase(
        self, ways: Sequence[Way], in_flight: int, turns: int, seconds: float, seed: int
    ) -> Seen:
        """Ask for so many turns, or for as long; first let go by what was before."""
        await asyncio.sleep(WINDOW_S + 1)
        seen, began_s, waited_s = Seen(), time.monotonic(), _waited_s(self._gateway)
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
            asker = Asker(self._port, random.Random(f"{seed}/{number}"))  # noqa: S311
            shares = [way.share for way in ways]
            while seen.turns < turns and time.monotonic() < until_s:
                way = asker.dice.choices(ways, shares)[0]
                try:
                    async with asyncio.timeout(ANSWER_S):
                        answer = await way.go(asker, next(self._numbers))
                except TimeoutError:
                    asker.close()
                    answer = Answer(NEVER, b"no answer")
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

    async def _sample(self, seen: Seen) -> None:
        while True:
            seen.rss_mib.append(self._process.memory_info().rss / MIB)
            seen.descriptors.append(self._process.num_fds())
            await asyncio.sleep(SAMPLE_S)

    async def _lags(self, seen: Seen) -> None:
        """Ask the gateway itself, often enough to miss none of its seconds."""
        caller = Caller(self._port)
        try:
            while True:
                told = await caller.ask("/rose/v1/stats", b"", method="GET")
                stats = json.loads(told.body)
                seen.loop_lag_s = max(seen.loop_lag_s, stats["loop_lag_max_s"])
                seen.loop_busy_s = max(seen.loop_busy_s, stats["loop_busy_max_s"])
                await asyncio.sleep(WINDOW_S / 5)
        finally:
            caller.hang_up()

    async def _probe(self, seen: Seen) -> None:
        """Follow a stream that never ends, by asking for the next one before long."""
        last_s = time.monotonic()

        def heard(now_s: float) -> None:
            nonlocal last_s
            silence_s, last_s = now_s - last_s, now_s
            seen.silence_s = max(seen.silence_s, silence_s)

        caller = Caller(self._port, heard)
        try:
            for number in itertools.count():
                name, sampling = f"probe-{id(seen)}-{number}", {"max_tokens": PROBE_TOKENS}
                asked = {"request_id": name, "token_ids": [1], "sampling_params": sampling}
                await caller.ask(GENERATE, json.dumps({**asked, "stream": True}).encode())
        finally:
            caller.hang_up()

    async def _health(self, seen: Seen) -> None:
        caller = Caller(self._port)
        try:
            while True:
                asked_s = time.monotonic()
                await caller.ask("/health", b"", method="GET")
                seen.health_s = max(seen.health_s, time.monotonic() - asked_s)
                await asyncio.sleep(0.05)
        finally:
            caller.hang_up()


def _waited_s(pid: int) -> float:
    """For how long the process's first thread, whose the event loop is, was ready and not run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


@asynccontextmanager
async def soaking(folder: Path) -> AsyncIterator[Soak]:
    """Everything that is needed, in processes of its own but for the scheduler.

    The gateway has a core of its own where there are two: the rest must not be what holds it up.
    """
    *ports, gateway_port = free_ports(ENGINE_PORTS + 1)
    places = cores()
    with suppress(OSError):
        os.sched_setaffinity(0, places["generator"])
    argv = [sys.executable, "-m", "rose.bench.soak.engine", *map(str, ports)]
    engine = Measured("engine", argv, folder / "engine.log", places["engine"], piped=True)
    try:
        engine.read()
        async with LeasingScheduler(ports) as scheduler:  # type: ignore[abstract]
            argv = [sys.executable, "-m", "rose.gateway.main", f"--port={gateway_port}"]
            argv += [f"--scheduler=127.0.0.1:{scheduler.port}", "--max-waiting=4096"]
            argv += ["--answers-kept=1024", "--resume-grace-s=1", "--version-wait-s=0.2"]
            gateway = Measured("gateway", argv, folder / "gateway.log", places["router"])
            try:
                url, ready = f"http://127.0.0.1:{gateway_port}/health", f'"replicas": {len(ports)}'
                await asyncio.to_thread(gateway.wait_answers, url, ready)
                yield Soak(gateway_port, gateway.pid, scheduler)
            finally:
                await asyncio.to_thread(gateway.end)
    finally:
        await asyncio.to_thread(engine.end)

"""Player of a block: grants, guest load, host load, and the engines' counters at its edges."""

import asyncio
import itertools
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from bench.common.engines import EngineSet, family, make_background, make_foreground
from bench.common.jsonl_process import JsonlProcess
from bench.common.stats import metric
from bench.coserve.busy_hold import HostBusyHold, limit_of
from bench.coserve.plan import GUEST, HOST, NAIVE, Arm, GuestLoad, PlanBlock
from bench.coserve.records import BLOCKS, CoserveBlockRecord, Counters
from bench.load.generator import CompletionBody, complete
from bench.load.protocol import LoadConfig
from executor import (
    ControlPage,
    Grant,
    GrantController,
    GuardConfig,
    PressureLimits,
    PressurePolicy,
)
from rose.errors import RoseError, UnavailableError
from rose.logs.eventlog import KEEP_ALL, EventLog, JsonlLog
from rose.node.guest.guard import GUEST_SAMPLES, GuardedHost, GuardThread
from rose.node.guest.kill_switch import KillSwitch
from rose.node.host import HOST_LATENCY, HostWatch
from rose.process.child import ProcessSpec

# Counters of each engine: requests that have to be computed again, and generated tokens. SGLang
# counts the latter when their request ends.
PREEMPTIONS = "vllm:num_preemptions_total", "sglang:num_retracted_requests_total"
TOKENS = "vllm:generation_tokens_total", "sglang:generation_tokens_total"
TOKEN_IDS = (3, 250)
RETRY_S = 0.2
# Shares of the host's KV memory that a loaded bench host crosses again and again, so that the two
# policies differ.
KV_HIGH, KV_LOW = 0.12, 0.08
# Streams fill the guest's batch before the host's load begins.
FILL_S = 0.7
POLL_S = 0.02
HTTP_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 60.0
EMPTY_PATIENCE_S = 5.0
NONE, NORMAL, SCHED_IDLE = "none", "normal", "SCHED_IDLE"


async def scrape(session: aiohttp.ClientSession, url: str) -> str:
    """Return an engine's /metrics. Raises UnavailableError when it does not answer."""
    try:
        async with session.get(f"{url}/metrics") as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(f"{url}/metrics does not answer: {error!r}") from error


async def read_counters(
    session: aiohttp.ClientSession, page: ControlPage, host_url: str, naive_url: str
) -> Counters:
    """Read all counters; the page last: it costs nothing, so it is read closest to the moment."""
    naive = await scrape(session, naive_url)
    host = await scrape(session, host_url)
    host_state, guest_state = page.host_state, page.guest.peek()
    return Counters(
        host_busy_ns=host_state.busy_ns if host_state else 0,
        host_preemptions=round(metric(host, PREEMPTIONS)),
        guest_tokens=guest_state.tokens_total if guest_state else 0,
        naive_tokens=round(metric(naive, TOKENS)),
    )


class ClosedLoop:
    """Streams of greedy completions with lengths taken from `lengths` (prompt, output)."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        streams: int,
        lengths: Iterator[tuple[int, int]],
        seed: str,
        secret: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.done = 0
        self.failed = 0
        self._session = session
        self._secret = secret
        self._url = f"{url}/v1/completions"
        self._model = model
        self._streams = streams
        self._lengths = lengths
        self._rng = random.Random(f"closed/{seed}")  # noqa: S311 - a load, not a secret
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all streams."""
        self._tasks = [asyncio.create_task(self._stream(k)) for k in range(self._streams)]

    async def stop(self) -> None:
        """Cancel the requests; an engine aborts a request whose client has gone."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    async def _stream(self, index: int) -> None:
        # First answers are cut to different lengths, or all streams would end in the same step.
        share = (index + 1) / self._streams
        number = 0
        while True:
            prompt_tokens, output_tokens = next(self._lengths)
            output_tokens = max(2, round(output_tokens * share))
            share = 1.0
            prompt = self._rng.choices(range(*TOKEN_IDS), k=prompt_tokens)
            body = CompletionBody(self._model, prompt, output_tokens)
            name = f"closed{index}n{number}"
            result = await complete(
                self._session, self._url, body, name, time.monotonic(), self._secret
            )
            number += 1
            if result.status == "ok":
                self.done += 1
            else:
                self.failed += 1
                await asyncio.sleep(RETRY_S)


def guard_config(arm: Arm, load: GuestLoad) -> GuardConfig:
    """Return the arm's limits."""
    policy = PressurePolicy(arm.policy or PressurePolicy.ADAPTIVE)
    pressure = PressureLimits(policy, high=KV_HIGH, low=KV_LOW)
    share = arm.slack_share or 0.0
    return GuardConfig(load.token_budget, load.streams, slack_share=share, pressure=pressure)


@dataclass(frozen=True, slots=True)
class _LentGuest:
    """Guest of one arm, as its guard sees it."""

    name: str
    lease_epoch: Callable[[], int | None]
    guard_broke: Callable[[], None]
    stalled: Callable[[str], None]
    warming: bool = False
    ranks: int = 1

    def boost(self, *, on: bool) -> None:
        """Leave the priority as it is."""

    def overdue(self, owed_bytes: int) -> None:
        """Reclaim nothing."""


class Granting:
    """Runner of one guard at a time; without a ROSE guest in the arm it grants nothing."""

    def __init__(
        self, page: ControlPage, out: Path, logs: Path, max_host_busy: float = 1.0
    ) -> None:
        """`max_host_busy`: as a capacity policy's `maxHostBusy.share`; 1 lends at any load."""
        self._page = page
        self._logs = logs
        # Figures need every record, and no production host waits for this disk.
        self._watch = HostWatch(JsonlLog(out / HOST_LATENCY, KEEP_ALL))
        self._samples = JsonlLog(out / GUEST_SAMPLES, KEEP_ALL)
        self._events = EventLog(logs, "guard", KEEP_ALL)
        self._guard: GuardThread | None = None
        self._broken = False
        self._arm = 0
        self._hold = HostBusyHold(
            limit_of(max_host_busy), lambda note: self._events.write(note.event, **note.fields)
        )
        self._lent = True
        # Loads begin and end in one thread, the guard asks in its own.
        self._holding = threading.Lock()

    def rule(self, arm: Arm, host_pid: int | None, load: GuestLoad) -> None:
        """Grant by the arm's rules from now on."""
        self.stop()
        self._arm += 1
        self._guard = GuardThread(
            _LentGuest(arm.name, lambda: self._lease_epoch(arm), self._break, self._stall),
            GuardedHost(self._page, self._watch, host_pid),
            GrantController(guard_config(arm, load), self._uncapped()),
            KillSwitch(self._logs / "KILL"),
            self._samples,
            self._events,
        )
        self._guard.start()

    def loaded(self, load: str | None) -> None:
        """Give the host this load from now on, or no load that a guest could harm."""
        with self._holding:
            if load is None:
                self._hold.end()
            else:
                self._hold.begin(load)

    def check(self) -> None:
        """Raise RoseError when the guard ended by itself: later measurements are void."""
        if self._broken:
            raise RoseError(f"the guard broke; see {self._logs}")

    def drain_latencies(self) -> None:
        """Write the host's latencies that are still in the ring; call it after `stop`."""
        self._watch.drain(self._page)

    def stop(self) -> None:
        """Stop granting."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None

    def _lease_epoch(self, arm: Arm) -> int | None:
        """Return the current lease; a naive guest's effect on its host is no load of its own."""
        if arm.guest != "naive":
            host = self._page.host_state
            with self._holding:
                lends = self._hold.lends(host.busy_ns if host else None, time.monotonic())
            # A scheduler grants a new lease too when it lends again.
            self._arm += lends and not self._lent
            self._lent = lends
        return self._arm if self._lent and arm.guest == "rose" else None

    def _uncapped(self) -> Grant | None:
        """Return the last grant without its cap: epochs go on, caps do not."""
        last = self._page.grant.peek()
        return None if last is None else replace(last, kv_granule_cap=0)

    def _stall(self, reason: str) -> None:
        # A bench that stalled knows as little as a node: the arm continues under a new lease.
        self._events.write("stalled", reason=reason)
        self._arm += 1

    def _break(self) -> None:
        self._broken = True


Drill = Callable[[int], Awaitable[None]]


class Edge(NamedTuple):
    """A block's begin or end, and the counters read there."""

    at_s: float
    counters: Counters


@dataclass(slots=True)
class Player:
    """Player that numbers and records blocks, one after another.

    lent_priority: see `BenchSettings`. insist_empty: a host that works on after its load has ended
    is an error, since the next block would pay for it. empty_patience_s: longest wait for that.
    """

    seed: int
    guest: GuestLoad
    engines: EngineSet
    page: ControlPage
    granting: Granting
    load: JsonlProcess
    session: aiohttp.ClientSession
    log: JsonlLog
    records: list[CoserveBlockRecord] = field(default_factory=list)
    lent_priority: Literal["background", "normal"] = "background"
    insist_empty: bool = False
    empty_patience_s: float = EMPTY_PATIENCE_S

    async def play(self, block: PlanBlock, drill: Drill | None = None) -> CoserveBlockRecord:
        """Play one block; `drill` gets its number and runs beside it."""
        number = len(self.records)
        self.rule(block.arm)
        streams = self._streams(block.arm, number)
        if streams:
            streams.start()
            await asyncio.sleep(FILL_S)
        counters = await self._counters()
        start = Edge(time.monotonic(), counters)
        await self._load_host(block, number)
        beside = asyncio.ensure_future(drill(number)) if drill else None
        await asyncio.sleep(block.duration_s)
        end_s = time.monotonic()
        end = Edge(end_s, await self._counters())
        await self.load.say(cmd="off")
        # Requests in flight were sent under this arm's rules, so they are served under them.
        await self._host_empty(block.arm)
        self.granting.loaded(None)
        if streams:
            await streams.stop()
        if beside:
            # A drill that outlasts its window (a guest's start) goes on without host load.
            await beside
        await self._guests_empty()
        self.granting.check()
        self.engines.check()
        self.load.check()
        return self._recorded(block, number, start, end)

    async def _load_host(self, block: PlanBlock, number: int) -> None:
        if block.cell is None:
            return
        self.granting.loaded(f"{block.cell.busy_target} {block.cell.traffic}")
        await self.load.say(
            cmd="segment",
            segment=block.segment,
            block=number,
            arm=block.arm.name,
            rate_per_s=block.cell.rate_per_s,
            traffic=block.cell.traffic,
        )

    def _recorded(
        self, block: PlanBlock, number: int, start: Edge, end: Edge
    ) -> CoserveBlockRecord:
        cell = block.cell
        record = CoserveBlockRecord(
            block=number,
            arm=block.arm.name,
            round=block.round,
            segment=block.segment,
            busy_target=cell.busy_target if cell else None,
            traffic=cell.traffic if cell else None,
            rate_per_s=cell.rate_per_s if cell else None,
            policy=block.arm.policy,
            slack_share=block.arm.slack_share,
            isolation=self._isolation(block.arm),
            start_s=start.at_s,
            end_s=end.at_s,
            start=start.counters,
            end=end.counters,
        )
        self.records.append(record)
        self.log.write(msgspec.to_builtins(record))
        return record

    def rule(self, arm: Arm) -> None:
        """Schedule and grant by the arm's rules."""
        guest = self.engines.pid(GUEST)
        if self.lent_priority == "normal" and guest is not None:
            place = make_foreground if self._isolation(arm) == NORMAL else make_background
            for pid in family(guest):
                place(pid)
        self.granting.rule(arm, self.engines.pid(HOST), self.guest)

    def _isolation(self, arm: Arm) -> str:
        lent = arm.guest == "rose" and bool(arm.slack_share)
        normal = arm.guest == "naive" or (lent and self.lent_priority == "normal")
        return NONE if arm.guest == "none" else NORMAL if normal else SCHED_IDLE

    def _streams(self, arm: Arm, number: int) -> ClosedLoop | None:
        name = {"rose": GUEST, "naive": NAIVE}.get(arm.guest)
        if name is None or self.engines.pid(name) is None:
            return None
        guest = self.guest
        lengths = itertools.repeat((guest.prompt_tokens, guest.output_tokens))
        return ClosedLoop(
            self.session,
            self.engines.url(name),
            name,
            guest.streams,
            lengths,
            f"{self.seed}/{number}",
            self.engines.headers(name),
        )

    async def _counters(self) -> Counters:
        return await read_counters(
            self.session, self.page, self.engines.url(HOST), self.engines.url(NAIVE)
        )

    async def _host_empty(self, arm: Arm) -> None:
        def empty() -> bool:
            host = self.page.host_state
            return host is not None and host.idle

        await self._until(empty)
        if self.insist_empty and not empty():
            self.engines.check()
            raise RoseError(
                f"the host is still busy {self.empty_patience_s:.0f} s after the load of arm"
                f" {arm.name} ended: it cannot serve this load beside that guest; lower the load"
            )

    async def _guests_empty(self) -> None:
        def empty() -> bool:
            guest = self.page.guest.peek()
            return guest is None or not (guest.running or guest.waiting)

        if self.engines.pid(GUEST) is not None:
            await self._until(empty)
        deadline_s = time.monotonic() + self.empty_patience_s
        while time.monotonic() < deadline_s:
            text = await scrape(self.session, self.engines.url(NAIVE))
            if not metric(text, "num_requests_running") + metric(text, "num_requests_waiting"):
                return
            await asyncio.sleep(POLL_S)

    async def _until(self, done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self.empty_patience_s
        while not done() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - polls memory
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def playing(
    engines: EngineSet,
    page: ControlPage,
    granting: Granting,
    start: Callable[[], Awaitable[None]],
    config: LoadConfig,
    logs: Path,
    *,
    first: Arm,
    guest: GuestLoad,
    core: int | None = None,
    **options: Any,  # noqa: ANN401 - of the player
) -> AsyncIterator[Player]:
    """Start the engines, then the load of the host's clients; give the player, and end everything.

    start: starts the engines under the rules of `first`, since a guest that never sees a grant ends
    itself. core: CPU of the load generator.
    """
    async with AsyncExitStack() as stack:
        stack.callback(page.close)
        stack.callback(granting.drain_latencies)
        stack.callback(granting.stop)
        stack.push_async_callback(engines.stop)
        granting.rule(first, None, guest)
        await start()
        path = page.path.with_name("load.json")
        path.write_text(config.model_dump_json())
        argv = (sys.executable, "-m", "bench.load.generator", "--config", str(path))
        log = logs / "load.log"
        cores = () if core is None else (core,)
        load = await JsonlProcess.start(ProcessSpec("load", argv, log=log, cores=cores, piped=True))
        stack.push_async_callback(load.stop)
        await load.expect("ready", READY_TIMEOUT_S)
        # Any number of requests at once, each with a timeout.
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=HTTP_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        )
        http = await stack.enter_async_context(session)
        log_of_blocks = JsonlLog(config.out.with_name(BLOCKS), KEEP_ALL)
        yield Player(
            config.seed, guest, engines, page, granting, load, http, log_of_blocks, **options
        )

"""Plays one block: grants, guest load, host load, counters at its edges."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import aiohttp
import msgspec

from executor import ControlPage
from rose.bench.coserve.closed_loop import ClosedLoop
from rose.bench.coserve.counters import metric, read_counters, scrape
from rose.bench.coserve.granting import Granting
from rose.bench.coserve.guest_load import GuestLoad
from rose.bench.coserve.names import GUEST, HOST, NAIVE
from rose.bench.coserve.plan import Arm, Block
from rose.bench.coserve.records import BlockRecord, Counters
from rose.errors import RoseError
from rose.logs.eventlog import JsonlLog
from rose.process.child import JsonlProcess

# Streams fill the guest's batch before the host's load begins.
FILL_S = 0.7
POLL_S = 0.02
EMPTY_PATIENCE_S = 5.0
NONE, NORMAL, SCHED_IDLE = "none", "normal", "SCHED_IDLE"

Drill = Callable[[int], Awaitable[None]]


class Edge(NamedTuple):
    """A block's begin or end, and the counters read there."""

    at_s: float
    counters: Counters


class PlayedEngines(Protocol):
    """Host and guests that run already."""

    def url(self, name: str) -> str:
        """Address of an engine."""
        ...

    def headers(self, name: str) -> dict[str, str]:
        """What it asks for of whoever completes there without a lease."""
        ...

    def pid(self, name: str) -> int | None:
        """Its API process while it runs."""
        ...

    def prioritise_guest(self, *, background: bool) -> None:
        """Schedule the ROSE guest behind everybody else, or as everybody else."""
        ...

    def check(self) -> None:
        """Raise when an engine ended by itself."""
        ...


@dataclass(slots=True)
class Player:
    """Numbers and records blocks, one after another.

    lent_priority: see `BenchSettings`.
    insist_empty: a host that works on after its load has ended is an error, since the next block
    would pay for it. empty_patience_s: how long that may take.
    """

    seed: int
    guest: GuestLoad
    engines: PlayedEngines
    page: ControlPage
    granting: Granting
    load: JsonlProcess
    session: aiohttp.ClientSession
    log: JsonlLog
    records: list[BlockRecord] = field(default_factory=list)
    lent_priority: Literal["background", "normal"] = "background"
    insist_empty: bool = False
    empty_patience_s: float = EMPTY_PATIENCE_S

    async def play(self, block: Block, drill: Drill | None = None) -> BlockRecord:
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
        # What is still out was asked for under this arm's rules, so it is served under them.
        await self._host_empty(block.arm)
        if streams:
            await streams.stop()
        if beside:
            # A drill that outlasts its window (a guest's start) goes on without host load.
            await beside
        await self._guests_empty()
        self.granting.check()
        self.engines.check()
        return self._recorded(block, number, start, end)

    async def _load_host(self, block: Block, number: int) -> None:
        if block.cell is None:
            return
        await self.load.say(
            cmd="segment",
            segment=block.segment,
            block=number,
            arm=block.arm.name,
            rate_per_s=block.cell.rate_per_s,
            traffic=block.cell.traffic,
        )

    def _recorded(self, block: Block, number: int, start: Edge, end: Edge) -> BlockRecord:
        cell = block.cell
        record = BlockRecord(
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
        if self.lent_priority == "normal" and self.engines.pid(GUEST) is not None:
            self.engines.prioritise_guest(background=self._isolation(arm) != NORMAL)
        self.granting.rule(arm, self.engines.pid(HOST), self.guest.token_budget, self.guest.streams)

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
            host = self.page.host.peek()
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

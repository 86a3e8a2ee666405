"""One running set of engines, and everything that plays on it: what the pieces of a call share.

    cell = await session.cell(0.6, "poisson")
    record = await session.play(Block(ALONE, 10.0, 0, 1, cell))
    rows = await session.rows([record, ...], rules)

A piece gets the session and how long it may take. What it leaves behind is the next one's: it
returns with the host idle and without leases, as `play` does.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp

from executor import ControlPage
from rose.bench.coserve.calibration import find_rate, measure_capacity, pace
from rose.bench.coserve.plan import CALIBRATION, Block, Cell
from rose.bench.coserve.player import Drill, Player
from rose.bench.coserve.rate_search import RateSearch
from rose.bench.coserve.records import (
    CLIENT_REQUESTS,
    HOST_LATENCY,
    BlockRecord,
    Calibration,
    Records,
    RunInfo,
)
from rose.bench.coserve.rows import Analysis, Row, Rules
from rose.bench.coserve.steps import read_steps
from rose.bench.gpu.serve.engines import ServingEngines
from rose.bench.gpu.serve.rates import KeptRates
from rose.bench.gpu.serve.sizes import ServingSizes
from rose.errors import RoseError
from rose.load.protocol import (
    ClientRequest,
    HostLatency,
    LoadConfig,
    Request,
    Traffic,
    join_requests,
)
from rose.logs.eventlog import read_lines
from rose.node.grants.guard_thread import GUEST_SAMPLES, GuestSample
from weight_transfer import SigningKey

FLUSH_S = 0.5
# A segment from which the capacity's lengths are drawn.
LENGTHS_S = 60.0


@dataclass(slots=True)
class ServingSession:
    """folder: raw records and logs. until_s: when this process has to be done (monotonic clock).

    key: signs what the guest accepts as weights. start_s: what the engines took to start.
    http: for requests to the engines; its requests have a timeout.
    """

    sizes: ServingSizes
    folder: Path
    until_s: float
    key: SigningKey
    engines: ServingEngines
    page: ControlPage
    load_config: LoadConfig
    http: aiohttp.ClientSession
    player: Player
    rates: KeptRates
    start_s: float
    _capacity_rps: float | None = None

    @property
    def left_s(self) -> float:
        """What this process may still take."""
        return self.until_s - time.monotonic()

    def say(self, what: str) -> None:
        """A line in the log of the pieces."""
        sys.stdout.write(f"{self.left_s:6.1f} s left: {what}\n")
        sys.stdout.flush()

    async def play(self, block: Block, drill: Drill | None = None) -> BlockRecord:
        """Play one block. Raises RoseError, which names the engine where one of them ended."""
        load = f"busy {block.cell.busy_target:g} {block.cell.traffic}" if block.cell else "host off"
        self.say(f"{block.arm.name}, {load}")
        try:
            return await self.player.play(block, drill)
        except RoseError:
            self.engines.check()
            raise

    async def cell(self, busy: float, traffic: Traffic) -> Cell:
        """The load that keeps the host alone busy for such a share of the time.

        Its rate is searched once and kept beside the results; each block measures how busy the
        host really was. Raises RoseError where no rate comes near.
        """
        found = self.rates.get(busy, traffic) or await self._search(busy, traffic)
        return Cell(busy, traffic, found.rate_per_s)

    async def capacity_rps(self) -> float:
        """Requests/s of this session's host with all of its streams, measured once."""
        if self._capacity_rps is None:
            self.say("host alone: capacity")
            sizes = self.sizes
            shape = replace(self.load_config.shape(), segment_s=LENGTHS_S)
            self._capacity_rps = await measure_capacity(
                self.player, shape, sizes.host_sequences, sizes.capacity_s
            )
        return self._capacity_rps

    async def rows(self, blocks: Sequence[BlockRecord], rules: Rules) -> list[Row]:
        """What these blocks say: a row for each arm of each cell, judged by `rules`."""
        capacity_rps = await self.capacity_rps()
        await self._flush()
        return Analysis(self._records(blocks, capacity_rps), rules).rows()

    async def requests(self) -> list[Request]:
        """Every request of the host so far, in whichever block."""
        await self._flush()
        return self._requests()

    async def _flush(self) -> None:
        await self.player.load.say(cmd="off")  # makes it write what it holds
        await asyncio.sleep(FLUSH_S)

    def _requests(self) -> list[Request]:
        return join_requests(
            read_lines(self.folder / CLIENT_REQUESTS, ClientRequest),
            read_lines(self.folder / HOST_LATENCY, HostLatency),
        )

    def _records(self, blocks: Sequence[BlockRecord], capacity_rps: float) -> Records:
        sizes, folder = self.sizes, self.folder
        return Records(
            run=RunInfo(
                seed=sizes.seed,
                quick=False,
                settings=asdict(sizes),
                machine={},
                capacity_rps=capacity_rps,
                calibrations=[],
                ttft_target_s=sizes.ttft_target_s,
                tpot_target_s=sizes.tpot_target_s,
                targets_from="given",
            ),
            blocks=list(blocks),
            requests=self._requests(),
            events=[],
            steps={role: read_steps(folder, role) for role in ("host", "guest")},
            guest=read_lines(folder / GUEST_SAMPLES, GuestSample),
        )

    async def _search(self, busy: float, traffic: Traffic) -> Calibration:
        self.say(f"host alone: the rate that keeps it busy for {busy:g} of the time")
        sizes = self.sizes
        search = RateSearch(busy, await pace(self.player))
        block = Block(CALIBRATION, sizes.calibration_s, 0, 0, Cell(busy, traffic, 1.0))
        await find_rate(self.player, search, block, sizes.tries)
        rate, nearest = search.nearest
        if abs(nearest - busy) > sizes.busy_tolerance:
            raise RoseError(
                f"the host alone was busy {nearest:.2f} of the time at {rate:.2f} requests/s, the"
                f" nearest of {len(search.tries)} tries to {busy:g}; see {self.folder}"
            )
        found = Calibration(busy, traffic, rate, search.tries)
        self.rates.put(found)
        return found

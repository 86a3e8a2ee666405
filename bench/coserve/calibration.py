"""Measurements of the host alone: capacity in a closed loop, the rate of each load, the targets."""

import asyncio
import itertools
import math
import time
from dataclasses import dataclass, field, replace

from bench.coserve.plan import CALIBRATION, HOST, ArmCell, BenchSettings, PlanBlock
from bench.coserve.player import ClosedLoop, Player
from bench.coserve.records import Calibration, CoserveBlockRecord
from bench.load.protocol import MOST_RATE_PER_S, LoadShape, Request, generate_segment
from rose.errors import RoseError
from slo import percentile

CLOSE_ENOUGH = 0.02
_EDGE = 0.01
PACE_TIMEOUT_S = 60.0
CAPACITY_WARM_UP_S = 1.5
# A host's first step, which loads and compiles, has taken 8 s over two ranks.
FIRST_ANSWERS_S = 60.0
POLL_S = 0.1
TARGET_OVER_ALONE_P99 = 3.0
TARGETS_FROM = (
    f"{TARGET_OVER_ALONE_P99:g} × the p99 of the host alone at the highest load of the calibration"
)


@dataclass(slots=True)
class RateSearch:
    """Bisection that proposes each rate from the busy time that the nearest try measured.

    If requests were served side by side the host would be idle with probability exp(-rate ×
    request_s) (an M/G/∞ queue); batching only changes request_s.
    """

    target: float
    request_s: float
    tries: list[tuple[float, float]] = field(default_factory=list)

    @property
    def rate_per_s(self) -> float:
        """Rate to try next."""
        if not self.tries:
            return self._rate(self.request_s)
        rate, busy = self.nearest
        busy = min(1 - _EDGE, max(_EDGE, busy))
        proposed = self._rate(-math.log(1 - busy) / rate)
        low = max((r for r, b in self.tries if b <= self.target), default=0.0)
        high = min((r for r, b in self.tries if b > self.target), default=math.inf)
        if not low < proposed < high and 0 < low < high < math.inf:
            proposed = math.sqrt(low * high)
        # A try in a calm stretch of a trace may propose a rate that cannot be played.
        return min(proposed, MOST_RATE_PER_S)

    @property
    def nearest(self) -> tuple[float, float]:
        """(rate, busy) of the try that came closest."""
        return min(self.tries, key=lambda tried: abs(tried[1] - self.target))

    @property
    def found(self) -> bool:
        """True if the nearest try is near enough."""
        return bool(self.tries) and abs(self.nearest[1] - self.target) <= CLOSE_ENOUGH

    def measured(self, rate_per_s: float, busy: float) -> None:
        self.tries.append((rate_per_s, busy))

    def _rate(self, request_s: float) -> float:
        return -math.log(1 - self.target) / request_s


async def measure_capacity(
    player: Player, shape: LoadShape, sequences: int, seconds: float
) -> float:
    """Return requests/s of the load's own lengths, with all of the host's streams."""
    arrivals = generate_segment(shape, player.seed, 0)
    if not arrivals:
        raise RoseError("the load has no arrivals; choose longer blocks")
    lengths = itertools.cycle([(a.prompt_tokens, a.output_tokens) for a in arrivals])
    streams = ClosedLoop(
        player.session, player.engines.url(HOST), HOST, sequences, lengths, "capacity"
    )
    streams.start()
    end_s = time.monotonic() + FIRST_ANSWERS_S
    while streams.done < sequences and time.monotonic() < end_s:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(CAPACITY_WARM_UP_S)
    done, start_s = streams.done, time.monotonic()
    await asyncio.sleep(seconds)
    rate = (streams.done - done) / (time.monotonic() - start_s)
    await streams.stop()
    if not rate:
        raise RoseError("the host finished no request of the capacity measurement; see its log")
    return rate


async def find_rates(player: Player, settings: BenchSettings) -> list[Calibration]:
    """Return a rate for each busy target and kind of traffic, in the order of the cells."""
    request_s = await pace(player)
    found = []
    for number, (busy, traffic) in enumerate(
        itertools.product(settings.busy_targets, settings.traffics), 1
    ):
        # Measured over the segment that the first round of the cell will replay.
        block = PlanBlock(CALIBRATION, settings.calibration_s, 0, 1_000 * number)
        search = RateSearch(busy, request_s)
        await find_rate(
            player,
            search,
            replace(block, cell=ArmCell(busy, traffic, 1.0)),
            settings.calibration_tries,
        )
        found.append(Calibration(busy, traffic, search.nearest[0], search.tries))
    return found


async def pace(player: Player) -> float:
    """Return the seconds that a lone request of the middle length takes."""
    await player.load.say(cmd="pace", busy=0.5)
    return float((await player.load.expect("paced", PACE_TIMEOUT_S))["request_s"])


async def find_rate(player: Player, search: RateSearch, block: PlanBlock, tries: int) -> None:
    """Play the block at one rate after another until its host is busy enough, alone."""
    while len(search.tries) < tries and not search.found:
        rate = search.rate_per_s
        assert block.cell is not None
        tried = replace(block, cell=replace(block.cell, rate_per_s=rate))
        search.measured(rate, busy_of(await player.play(tried)))


def busy_of(record: CoserveBlockRecord) -> float:
    """Return the share of a block in which the host was inside a step, by its own counter."""
    return (record.end.host_busy_ns - record.start.host_busy_ns) / 1e9 / record.duration_s


def choose_targets(requests: list[Request]) -> tuple[float, float]:
    """Return (TTFT, TPOT) targets from requests that the host served alone. Raises RoseError."""
    ttft = [r.ttft_s for r in requests if r.ttft_s is not None]
    tpot = [r.tpot_s for r in requests if r.tpot_s]
    if not ttft or not tpot:
        raise RoseError("no latencies of the host alone; see the host's log")
    return (
        TARGET_OVER_ALONE_P99 * percentile(ttft, 0.99),
        TARGET_OVER_ALONE_P99 * percentile(tpot, 0.99),
    )

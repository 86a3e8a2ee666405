"""The host alone: capacity in a closed loop, then the rate for each load, then the targets."""

import asyncio
import itertools
import time
from dataclasses import replace

from rose.bench.coserve.closed_loop import ClosedLoop
from rose.bench.coserve.names import HOST
from rose.bench.coserve.plan import CALIBRATION, Block, Cell
from rose.bench.coserve.player import Player
from rose.bench.coserve.rate_search import RateSearch
from rose.bench.coserve.records import BlockRecord, Calibration
from rose.bench.coserve.settings import BenchSettings
from rose.errors import RoseError
from rose.load.arrivals import LoadShape, generate_segment
from rose.load.protocol import Request
from slo import percentile

PACE_TIMEOUT_S = 60.0
CAPACITY_WARM_UP_S = 1.5
TARGET_OVER_ALONE_P99 = 3.0
TARGETS_FROM = (
    f"{TARGET_OVER_ALONE_P99:g} × the p99 of the host alone at the highest load of the calibration"
)


async def measure_capacity(
    player: Player, shape: LoadShape, sequences: int, seconds: float
) -> float:
    """Requests/s of the load's own lengths, with as many streams as the host takes at once."""
    arrivals = generate_segment(shape, player.seed, 0)
    if not arrivals:
        raise RoseError("the load has no arrivals; choose longer blocks")
    lengths = itertools.cycle([(a.prompt_tokens, a.output_tokens) for a in arrivals])
    streams = ClosedLoop(
        player.session, player.engines.url(HOST), HOST, sequences, lengths, "capacity"
    )
    streams.start()
    await asyncio.sleep(CAPACITY_WARM_UP_S)
    done, start_s = streams.done, time.monotonic()
    await asyncio.sleep(seconds)
    rate = (streams.done - done) / (time.monotonic() - start_s)
    await streams.stop()
    if not rate:
        raise RoseError("the host finished no request of the capacity measurement; see its log")
    return rate


async def find_rates(player: Player, settings: BenchSettings) -> list[Calibration]:
    """One for each busy target and kind of traffic, in the order of the cells."""
    request_s = await pace(player)
    found = []
    for number, (busy, traffic) in enumerate(
        itertools.product(settings.busy_targets, settings.traffics), 1
    ):
        # Measured over the segment that the first round of the cell will replay.
        block = Block(CALIBRATION, settings.calibration_s, 0, 1_000 * number)
        search = RateSearch(busy, request_s)
        await find_rate(
            player,
            search,
            replace(block, cell=Cell(busy, traffic, 1.0)),
            settings.calibration_tries,
        )
        found.append(Calibration(busy, traffic, search.nearest[0], search.tries))
    return found


async def pace(player: Player) -> float:
    """Seconds that a lone request of the middle length takes."""
    await player.load.say(cmd="pace", busy=0.5)
    return float((await player.load.expect("paced", PACE_TIMEOUT_S))["request_s"])


async def find_rate(player: Player, search: RateSearch, block: Block, tries: int) -> None:
    """Play the block at one rate after another until its host is busy enough, alone."""
    while len(search.tries) < tries and not search.found:
        rate = search.rate_per_s
        assert block.cell is not None
        tried = replace(block, cell=replace(block.cell, rate_per_s=rate))
        search.measured(rate, busy_of(await player.play(tried)))


def busy_of(record: BlockRecord) -> float:
    """Share of a block in which the host was inside a step, by its own counter."""
    return (record.end.host_busy_ns - record.start.host_busy_ns) / 1e9 / record.duration_s


def choose_targets(requests: list[Request]) -> tuple[float, float]:
    """(TTFT, TPOT) targets from requests that the host served alone; RoseError without any."""
    ttft = [r.ttft_s for r in requests if r.ttft_s is not None]
    tpot = [r.tpot_s for r in requests if r.tpot_s]
    if not ttft or not tpot:
        raise RoseError("no latencies of the host alone; see the host's log")
    return (
        TARGET_OVER_ALONE_P99 * percentile(ttft, 0.99),
        TARGET_OVER_ALONE_P99 * percentile(tpot, 0.99),
    )

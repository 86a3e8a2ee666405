"""Pieces `serve30`, `serve60`, `serve90`, `bursts`: one load, every arm beside it."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rose.bench.coserve.plan import Cell
from rose.bench.coserve.records import BlockRecord
from rose.bench.coserve.rows import Row, arm_of
from rose.bench.coserve.verdict import FAILS
from rose.bench.gpu.piece import Measured
from rose.bench.gpu.serve.bursts import burst_windows, figures_of
from rose.bench.gpu.serve.rounds import play_rounds
from rose.bench.gpu.serve.rules import card_rules, requests_wanted
from rose.bench.gpu.serve.session import ServingSession
from rose.load.arrivals import read_trace

# Of the load's own stream of segments, which no other load plays.
FIRST_SEGMENT = 1_000


async def busy_30(session: ServingSession, seconds: float) -> Measured:
    """Poisson arrivals that keep the host alone busy for 0.3 of the time."""
    return await _steady(session, 0.3, seconds)


async def busy_60(session: ServingSession, seconds: float) -> Measured:
    """As above, 0.6."""
    return await _steady(session, 0.6, seconds)


async def busy_90(session: ServingSession, seconds: float) -> Measured:
    """As above, 0.9."""
    return await _steady(session, 0.9, seconds)


async def bursts(session: ServingSession, seconds: float) -> Measured:
    """Windows of the bursty trace, at its own pace."""
    until_s = time.monotonic() + seconds
    sizes = session.sizes
    assert session.load_config.trace is not None
    trace = read_trace(session.load_config.trace)
    figures = figures_of(trace)
    windows = burst_windows(trace, sizes.arm_s, sizes.rounds, sizes.seed)
    cell = Cell(0.0, "trace", figures.mean_per_s)
    return await _measured(session, cell, windows, until_s) | {
        "traffic": {
            "trace": sizes.trace_digest,
            **asdict(figures),
            "windows": windows,
        }
    }


async def _steady(session: ServingSession, busy: float, seconds: float) -> Measured:
    until_s = time.monotonic() + seconds
    cell = await session.cell(busy, "poisson")
    first = FIRST_SEGMENT * round(busy * 100)
    segments = range(first, first + session.sizes.rounds)
    found = await _measured(session, cell, segments, until_s)
    return found | {"traffic": {"poisson": True, "rate_per_s": cell.rate_per_s}}


async def _measured(
    session: ServingSession, cell: Cell, segments: Sequence[int], until_s: float
) -> Measured:
    capacity_rps = await session.capacity_rps()
    records = await play_rounds(session, cell, segments, until_s)
    rows = await session.rows(records, card_rules)
    return {
        "engines_start_s": session.start_s,
        "capacity_rps": capacity_rps,
        "rounds": 1 + max(record.round for record in records),
        "order": [record.arm for record in records],
        "rows": [row | _wanted(row) for row in rows],
        "naive_harms_the_host": _harmed(rows),
        "blocks": [_told(record) for record in records],
    }


def _wanted(row: Row) -> dict[str, int]:
    return {"requests_wanted_for_p99": requests_wanted(row["host"]["requests"])}


def _harmed(rows: Sequence[Row]) -> bool:
    """What ROSE is measured against is real only where naive co-location fails."""
    return any(row["verdict"] == FAILS for row in rows if arm_of(row).guest == "naive")


def _told(record: BlockRecord) -> dict[str, Any]:
    return {
        "arm": record.arm,
        "round": record.round,
        "segment": record.segment,
        "seconds": record.duration_s,
        "guest_tokens": record.guest_tokens,
    }

"""Pieces `serve30`, `serve60`, `serve90`, `bursts`: one load, every arm beside it."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from bench.common.checks import FAILS, Check, at_most, exactly_none
from bench.common.stats import latency_s
from bench.coserve.plan import ARMS, IDLE_NAIVE, IDLE_ROSE, ArmCell, PlanBlock
from bench.coserve.records import CoserveBlockRecord
from bench.coserve.rows import (
    MIN_REQUESTS_FOR_P99,
    Evidence,
    arm_of,
    harvest_checks,
    ratio_checks,
    undecided,
)
from bench.gpu.pieces import ANALYSIS_S, Measured, ServingSizes
from bench.gpu.serving import ServingSession
from rose.azure_trace import TracedRequest, read_trace
from rose.compare.bootstrap import Estimate, percentile_estimate

STOP_S = 0.020
# The ratio in the paper on ROSE.
TTFT_P99_RATIO = 1.07
# Each load plays segments of its own.
FIRST_SEGMENT = 1_000


def card_rules(found: Evidence) -> list[Check]:
    """Return all checks of an arm on a card.

    In bf16 an answer depends on its batch, so tokens that differ from those alone decide nothing:
    the row counts them, beside those of `alone_again`.
    """
    caused = max(0, found.caused_preemptions)
    checks = [exactly_none("host_preemptions", caused, len(found.requests))]
    if found.group.arm.slack_share:
        targets_s = {"ttft": found.spec.ttft_s, "tpot": found.spec.tpot_s}
        checks += [
            at_most(f"{metric}_p99_s", _p99(found, metric), target_s)
            for metric, target_s in targets_s.items()
        ]
    else:
        checks += _ratio_checks(found)
    return checks + harvest_checks(found) + _stop_checks(found)


def requests_wanted(requests: int) -> int:
    """Return the requests that an arm lacks for a verdict on its p99."""
    return max(0, MIN_REQUESTS_FOR_P99 - requests)


def _ratio_checks(found: Evidence) -> list[Check]:
    """Judge host latencies against alone: p90 decides, p99 once an arm has enough requests."""
    checks = ratio_checks(found, found.guest["guest_step_p99_s"] or 0.0)
    kept = [check for check in checks if check.name.endswith("p90")]
    decisive = requests_wanted(len(found.requests)) == 0
    last = at_most("ttft_p99", found.ratios["ttft", 99], TTFT_P99_RATIO, decisive=decisive)
    return [*kept, last if decisive else undecided(last)]


def _p99(found: Evidence, metric: str) -> Estimate | None:
    windows = []
    for window in found.windows:
        values = [v for pair in window if (v := latency_s(pair.arm, metric)) is not None]
        if values:
            windows.append(values)
    return percentile_estimate(windows, 99, found.seed) if windows else None


def _stop_checks(found: Evidence) -> list[Check]:
    """Judge the time from a host's arrival to the end of the guest's last step.

    It decides where no slack is lent.
    """
    arm = found.group.arm
    if arm.guest != "rose":
        return []
    stop = percentile_estimate(found.stops, 99, found.seed) if found.stops else None
    return [
        at_most("stop_p99_s", stop, STOP_S, decisive=not arm.slack_share),
        at_most("guest_step_p99_s", found.guest["guest_step_p99_s"], STOP_S, decisive=False),
    ]


def round_of(cell: ArmCell, segment: int, number: int, sizes: ServingSizes) -> list[PlanBlock]:
    """Return every arm with the same arrivals, and each guest alone, in random order."""
    name = f"rose-serving/{sizes.seed}/{cell.busy_target}/{cell.traffic}/{number}"
    rng = random.Random(name)  # noqa: S311 - an order, not a secret
    blocks = [PlanBlock(arm, sizes.idle_s, number, 0) for arm in (IDLE_ROSE, IDLE_NAIVE)]
    blocks += [PlanBlock(arm, sizes.arm_s, number, segment, cell) for arm in ARMS]
    rng.shuffle(blocks)
    return blocks


async def _measured(
    session: ServingSession, cell: ArmCell, segments: Sequence[int], until_s: float
) -> Measured:
    """Play a round, then others while the longest so far would still end by `until_s`."""
    capacity_rps = await session.capacity_rps()
    records: list[CoserveBlockRecord] = []
    longest_s = 0.0
    for number, segment in enumerate(segments):
        began_s = time.monotonic()
        if records and began_s + longest_s + ANALYSIS_S > until_s:
            break
        blocks = round_of(cell, segment, number, session.sizes)
        records += [await session.play(block) for block in blocks]
        longest_s = max(longest_s, time.monotonic() - began_s)
    rows = await session.rows(records, card_rules)
    return {
        "engines_start_s": session.start_s,
        "capacity_rps": capacity_rps,
        "rounds": 1 + max(record.round for record in records),
        "order": [record.arm for record in records],
        "rows": [
            row | {"requests_wanted_for_p99": requests_wanted(row["host"]["requests"])}
            for row in rows
        ],
        # Only where naive co-location fails there was a danger.
        "naive_harms_the_host": any(
            row["verdict"] == FAILS for row in rows if arm_of(row).guest == "naive"
        ),
        "blocks": [_told(record) for record in records],
    }


def _told(record: CoserveBlockRecord) -> dict[str, Any]:
    kept = {name: getattr(record, name) for name in ("arm", "round", "segment", "guest_tokens")}
    return kept | {"seconds": record.duration_s}


async def _steady(busy: float, session: ServingSession, seconds: float) -> Measured:
    """Play Poisson arrivals that keep the host alone busy for this share of the time."""
    until_s = time.monotonic() + seconds
    cell = await session.cell(busy, "poisson")
    first = FIRST_SEGMENT * round(busy * 100)
    found = await _measured(session, cell, range(first, first + session.sizes.rounds), until_s)
    return found | {"traffic": {"poisson": True, "rate_per_s": cell.rate_per_s}}


busy_30, busy_60, busy_90 = (partial(_steady, busy) for busy in (0.3, 0.6, 0.9))


async def bursts(session: ServingSession, seconds: float) -> Measured:
    """Play windows of the bursty trace, at its own pace."""
    until_s = time.monotonic() + seconds
    sizes = session.sizes
    assert session.load_config.trace is not None
    trace = read_trace(session.load_config.trace)
    figures = burst_figures(trace)
    windows = burst_windows(trace, sizes.arm_s, sizes.rounds, sizes.seed)
    cell = ArmCell(0.0, "trace", figures["mean_per_s"])
    found = await _measured(session, cell, windows, until_s)
    return found | {"traffic": {"trace": sizes.trace_digest, **figures, "windows": windows}}


def burst_figures(trace: Sequence[TracedRequest]) -> dict[str, float]:
    """Return the figures of a trace; cv: deviation of times between arrivals over their mean."""
    times = [request.offset_s for request in trace]
    between = [later - earlier for earlier, later in pairwise(times)]
    return {
        "requests": len(times),
        "mean_per_s": len(times) / times[-1],
        "peak_per_s": max(Counter(int(at) for at in times).values()),
        "cv": statistics.pstdev(between) / statistics.fmean(between),
    }


def burst_windows(
    trace: Sequence[TracedRequest], segment_s: float, count: int, seed: int
) -> list[int]:
    """Return the segments to play: the one with the densest second, then others in random order.

    The others have at least the trace's mean rate: a window without requests shows nothing.
    """
    counts = Counter(int(request.offset_s / segment_s) for request in trace)
    last = max(1, int(trace[-1].offset_s / segment_s)) - 1
    densest = Counter(int(request.offset_s) for request in trace).most_common(1)[0][0]
    first = min(last, int(densest / segment_s))
    least = segment_s * len(trace) / trace[-1].offset_s
    others = [window for window in sorted(counts) if counts[window] >= least and window <= last]
    others = [window for window in others if window != first] or [first]
    rng = random.Random(f"rose-burst-windows/{seed}")  # noqa: S311 - an order, not a secret
    rng.shuffle(others)
    return [first, *(others[k % len(others)] for k in range(count - 1))]

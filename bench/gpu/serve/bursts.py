"""Bursts of the Azure code trace: read from its file, or generated with its figures.

The trace has phases of a few requests a second for some seconds, silences of up to minutes between
them, and one rush up to the peak. Mean 2.57/s, 67 in the densest second, a coefficient of variation
between arrivals near 13; generated lengths have the trace's median and 95th percentile.
"""

import csv
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from rose.azure_trace import COLUMNS, TracedRequest

GENERATED = "generated-bursts.csv"
AZURE_MEAN_PER_S, AZURE_REQUESTS = 2.57, 8_800
# Requests in each second of the rush.
RUSH = (20, 43, 30, 35, 51, 58, 67, 60, 40, 15)
PHASE_S, PHASE_RATE_PER_S, RATE_SPREAD, MOST_RATE_PER_S = 17.0, 6.5, 0.6, 30.0
SILENCE_SPREAD, LEAST_SILENCE_S = 0.95, 5.0
# (median, spread of the logarithm) of tokens.
PROMPT_TOKENS, OUTPUT_TOKENS = (1_469, 0.975), (13, 1.18)
_BEGAN = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class BurstFigures:
    """Figures of a trace. cv: deviation of times between arrivals over their mean."""

    requests: int
    mean_per_s: float
    peak_per_s: int
    cv: float


def figures_of(trace: Sequence[TracedRequest]) -> BurstFigures:
    """Return the figures of a trace of two requests or more."""
    times = [request.offset_s for request in trace]
    between = [later - earlier for earlier, later in pairwise(times)]
    return BurstFigures(
        len(times),
        len(times) / times[-1],
        max(Counter(int(at) for at in times).values()),
        statistics.pstdev(between) / statistics.fmean(between),
    )


def write_generated(path: Path, seed: int) -> None:
    """Write a generated trace in the Azure format."""
    rng = random.Random(f"rose-bursts/{seed}")  # noqa: S311 - a load, not a secret
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for at_s in generated_times(rng):
            moment = (_BEGAN + timedelta(seconds=at_s)).strftime("%Y-%m-%d %H:%M:%S.%f")
            writer.writerow([moment, _tokens(rng, *PROMPT_TOKENS), _tokens(rng, *OUTPUT_TOKENS)])


def generated_times(rng: random.Random) -> list[float]:
    """Return arrivals in seconds, in order; the first is at 0."""
    phases = list(_phases(rng))
    rush = _rush(rng)
    phases.insert(len(phases) // 4, rush)
    requests = sum(len(times) for times, _ in phases)
    active_s = sum(length_s for _, length_s in phases)
    silences = _silences(rng, len(phases))
    scale = (requests / AZURE_MEAN_PER_S - active_s) / sum(silences[:-1])
    found: list[float] = []
    start_s = 0.0
    for (times, length_s), silence in zip(phases, silences, strict=True):
        if times is rush[0]:
            start_s = math.ceil(start_s)  # its seconds are those that are counted
        found += [start_s + at for at in times]
        start_s += length_s + max(LEAST_SILENCE_S, silence * scale)
    return [round(at - found[0], 6) for at in found]


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


def _phases(rng: random.Random) -> Iterator[tuple[list[float], float]]:
    """Yield (arrivals, length) of each stretch of steady traffic, in seconds."""
    requests = sum(RUSH)
    while requests < AZURE_REQUESTS:
        length_s = max(1.0, rng.expovariate(1 / PHASE_S))
        rate = rng.lognormvariate(math.log(PHASE_RATE_PER_S), RATE_SPREAD)
        rate = min(MOST_RATE_PER_S, rate)
        times, at_s = [], 0.0
        while at_s < length_s:
            times.append(at_s)
            at_s += rng.expovariate(rate)
        requests += len(times)
        yield times, length_s


def _silences(rng: random.Random, count: int) -> list[float]:
    """Log-normal ones to scale: even quantiles, so that each seed has the same few long ones."""
    usual = statistics.NormalDist()
    found = [math.exp(SILENCE_SPREAD * usual.inv_cdf((k + 0.5) / count)) for k in range(count)]
    rng.shuffle(found)
    return found


def _rush(rng: random.Random) -> tuple[list[float], float]:
    times = [0.0]
    for second, count in enumerate(RUSH):
        times += [second + rng.random() for _ in range(count)]
    return sorted(times), float(len(RUSH))


def _tokens(rng: random.Random, median: float, spread: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), spread)))

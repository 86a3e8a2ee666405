"""Seeded bootstrap intervals (95%) of means, ratios and percentiles.

A unit repeats independently: a group of rollouts of one map, a pair of blocks, or a window of
replayed arrivals. Inside a unit samples depend on each other, so resampling single samples would
make intervals too narrow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 2_000
# Bounds the memory that resampled percentiles take.
RESAMPLES_AT_ONCE = 200
# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Value and its 95% interval (low, high), None where the data cannot give one."""

    value: float
    ci95: Interval | None


def _tail_probability(units: int) -> float:
    """Return the probability to cut off at each end of the percentile interval for `units` units.

    The plain percentile bootstrap is too narrow for few units; Hesterberg (2015), "What teachers
    should know about the bootstrap", widens it to what a t interval would cover.
    """
    t = _T_95[min(units - 1, len(_T_95)) - 1]
    return 0.5 * math.erfc(math.sqrt(units / (units - 1)) * t / math.sqrt(2))


def _interval(replicates: Floats, units: int) -> Interval | None:
    """Return the 95% interval of bootstrap replicates; None for fewer than two units, or if a
    replicate is NaN.
    """
    if units < 2 or bool(np.isnan(replicates).any()):
        return None
    tail = _tail_probability(units)
    low, high = np.quantile(replicates, (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)


def estimate_of_sums(
    groups: Sequence[Sequence[Sequence[float]]],
    statistic: Callable[[Sequence[Floats]], Floats],
    seed: int,
) -> Estimate:
    """Return a statistic of column sums over units, with its interval; each group's units are
    resampled by themselves.

    groups: arrays [units, columns]. statistic: called with each group's sums [..., columns].
    """
    rng = np.random.default_rng(seed)
    arrays = [np.array(group, dtype=np.float64) for group in groups]
    resampled = [
        array[rng.integers(len(array), size=(RESAMPLES, len(array)))].sum(axis=1)
        for array in arrays
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        replicates = statistic(resampled)
        value = statistic([array.sum(axis=0) for array in arrays])
    return Estimate(float(value), _interval(replicates, min(map(len, arrays))))


def ratio(sums: Floats) -> Floats:
    """Return column 0 divided by column 1 of sums [..., columns]."""
    found: Floats = sums[..., 0] / sums[..., 1]
    return found


def ratio_of_ratios(sums: Sequence[Floats]) -> Floats:
    """Return (column 0 / column 1) / (column 2 / column 3) of a group's sums [..., columns]."""
    return ratio(sums[0]) / ratio(sums[0][..., 2:])


def mean_difference(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], seed: int
) -> Estimate:
    """Return the mean of all samples in `after` minus that in `before`, with its interval.

    Both are units of samples, none empty; whole units are resampled.
    """
    groups = [[(math.fsum(unit), len(unit)) for unit in units] for units in (after, before)]
    return estimate_of_sums(groups, lambda sums: ratio(sums[0]) - ratio(sums[1]), seed)


def ratio_of_rates(
    above: Sequence[tuple[float, float]], below: Sequence[tuple[float, float]], seed: int
) -> Estimate:
    """Return the rate of `above` over the rate of `below`, with its interval.

    Each is a list of blocks (amount, duration), paired by index.
    """
    pairs = [(*a, *b) for a, b in zip(above, below, strict=True)]
    return estimate_of_sums([pairs], ratio_of_ratios, seed)


def paired_difference(pairs: Sequence[Sequence[tuple[float, float]]], seed: int) -> Estimate:
    """Return the mean of first minus second over all pairs, with its interval; whole windows of
    pairs are resampled, none is empty.
    """
    units = [(math.fsum(a - b for a, b in window), len(window)) for window in pairs]
    return estimate_of_sums([units], lambda sums: ratio(sums[0]), seed)


def percentile(values: Floats | Sequence[float], percent: float) -> float:
    """Return the percentile of values without interpolation, so it is one of them; a failed request
    counts as infinity.
    """
    return float(np.percentile(np.asarray(values), percent, method="inverted_cdf"))


@dataclass(frozen=True, slots=True)
class PairedWindow:
    """Latencies in seconds of one window's replayed arrivals in two arms; index i of both is the
    same arrival.
    """

    above: Sequence[float]
    below: Sequence[float]


def _resampled_percentiles(
    windows: Sequence[Sequence[float]], percent: float, copies: Floats
) -> Floats:
    """Return an array with the percentile of each resample; resample r has the values of window w
    `copies[r, w]` times.
    """
    values = np.concatenate([np.asarray(window, dtype=np.float64) for window in windows])
    window_of = np.repeat(np.arange(len(windows)), [len(window) for window in windows])
    order = np.argsort(values, kind="stable")
    found = []
    for some in np.array_split(copies, max(1, len(copies) // RESAMPLES_AT_ONCE)):
        below = np.cumsum(some[:, window_of[order]], axis=1)
        rank = np.ceil(below[:, -1:] * percent / 100)
        found.append(values[order][np.argmax(below >= rank, axis=1)])
    return np.concatenate(found)


def percentile_estimate(windows: Sequence[Sequence[float]], percent: float, seed: int) -> Estimate:
    """Return the percentile of all values, with its interval; whole windows are resampled, none is
    empty.
    """
    return ratio_of_percentiles([PairedWindow(w, [1.0] * len(w)) for w in windows], percent, seed)


def ratio_of_percentiles(windows: Sequence[PairedWindow], percent: float, seed: int) -> Estimate:
    """Return the percentile of all `above` over that of all `below`, with its interval; whole
    windows are resampled.

    The value is NaN where the lower percentile is 0 or infinite.
    """
    rng = np.random.default_rng(seed)
    even = np.full(len(windows), 1 / len(windows))
    # The first row is the sample itself: every window once.
    drawn = rng.multinomial(len(windows), even, RESAMPLES)
    copies = np.vstack([np.ones(len(windows)), drawn])
    above = _resampled_percentiles([window.above for window in windows], percent, copies)
    below = _resampled_percentiles([window.below for window in windows], percent, copies)
    # A ratio with 0 or infinity below it is not known.
    known = (below > 0) & np.isfinite(below)
    ratios = np.divide(above, below, out=np.full(len(above), math.nan), where=known)
    return Estimate(float(ratios[0]), _interval(ratios[1:], len(windows)))

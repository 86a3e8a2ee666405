"""Exact percentiles and classic Prometheus histograms of latencies.

Nearest rank is the definition of a percentile that every estimate in this package is tested
against. Histograms are the form that engines export, and that ROSE exports for its targets.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


def nearest_rank(fraction: float, count: int) -> int:
    """Return the rank, from 1, of the `fraction` percentile among `count` ordered values.

    Raises ValueError for a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; give one in (0, 1]")
    # 0.07 × 100 is a little more than 7 in floating point and must not become the eighth value.
    return max(1, math.ceil(fraction * count - 1e-9))


def percentile(values: Iterable[float], fraction: float) -> float:
    """Return the smallest value that at least `fraction` of the values do not exceed.

    This is the nearest-rank percentile. Raises ValueError without values or for a fraction outside
    (0, 1].
    """
    ordered = sorted(values)
    rank = nearest_rank(fraction, len(ordered))
    if not ordered:
        raise ValueError("no values: a percentile needs at least one")
    return ordered[rank - 1]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Classic Prometheus histogram: cumulative `counts` of values at or below each of `bounds_s`.

    The last count is of all values (+Inf). Raises ValueError for bounds that do not ascend, counts
    that fall, or a count too few or many.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds_s) + 1:
            raise ValueError(
                f"{len(self.bounds_s)} bounds need {len(self.bounds_s) + 1} counts, "
                f"not {len(self.counts)}"
            )
        if any(b <= a for a, b in zip(self.bounds_s, self.bounds_s[1:], strict=False)):
            raise ValueError(f"bounds {self.bounds_s} do not ascend")
        if any(b < a for a, b in zip((0, *self.counts), self.counts, strict=False)):
            raise ValueError(f"counts {self.counts} fall; they must be cumulative")

    @property
    def count(self) -> int:
        """Number of values observed."""
        return self.counts[-1]

    def at_most(self, bound_s: float) -> int:
        """Return how many values were certainly at or below `bound_s`.

        They are those up to the nearest bucket bound at or below it. An engine's buckets miss usual
        targets (vLLM's TTFT has 1.0 and 2.5 s but no 2.0), so this never calls a value good that
        may have missed.
        """
        index = bisect_right(self.bounds_s, bound_s)
        return self.counts[index - 1] if index else 0

    def quantile(self, fraction: float) -> float | None:
        """Return an estimated quantile as Prometheus' histogram_quantile does; None without values.

        It is linear inside a bucket. A rank above the last finite bound gives that bound. Raises
        ValueError for a fraction outside (0, 1].
        """
        rank = nearest_rank(fraction, self.count)
        if not self.count or not self.bounds_s:
            return None
        index = next((i for i, count in enumerate(self.counts) if count >= rank), 0)
        if index == len(self.bounds_s):
            return self.bounds_s[-1]
        lower_s, below = (self.bounds_s[index - 1], self.counts[index - 1]) if index else (0.0, 0)
        inside = (rank - below) / (self.counts[index] - below)
        return lower_s + (self.bounds_s[index] - lower_s) * inside

    def since(self, earlier: "Histogram") -> "Histogram | None":
        """Return the histogram of values after `earlier`; None if this does not continue it."""
        if self.bounds_s != earlier.bounds_s:
            return None
        grown = [now - then for now, then in zip(self.counts, earlier.counts, strict=True)]
        if any(b < a for a, b in zip([0, *grown], grown, strict=False)):
            return None
        return Histogram(self.bounds_s, tuple(grown), max(0.0, self.sum_s - earlier.sum_s))

    def buckets(self) -> list[tuple[str, float]]:
        """Return the (`le`, count) pairs that prometheus_client's HistogramMetricFamily takes.

        Prometheus wants counts that only rise: export one that is never emptied.
        """
        labels = [*map(repr, self.bounds_s), "+Inf"]
        return [(le, float(count)) for le, count in zip(labels, self.counts, strict=True)]

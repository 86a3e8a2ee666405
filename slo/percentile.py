"""Exact percentiles by nearest rank, the definition that every estimate here is held against."""

import math
from collections.abc import Iterable


def nearest_rank(fraction: float, count: int) -> int:
    """Rank, from 1, of the value that `fraction` of `count` ordered values do not exceed.

    Raises ValueError for a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; give one in (0, 1]")
    # 0.07 × 100 is a little more than 7 in floating point and must not become the eighth value.
    return max(1, math.ceil(fraction * count - 1e-9))


def percentile(values: Iterable[float], fraction: float) -> float:
    """Nearest-rank percentile: the smallest value that `fraction` of `values` do not exceed.

    Raises ValueError without values or for a fraction outside (0, 1].
    """
    ordered = sorted(values)
    rank = nearest_rank(fraction, len(ordered))
    if not ordered:
        raise ValueError("no values: a percentile needs at least one")
    return ordered[rank - 1]

"""Times of work that a device does while the host waits for it."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

WARM_UP_ROUNDS = 2


def synchronise(place: str) -> None:
    """Wait until the device has done everything."""
    if place.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], rounds: int, place: str) -> list[float]:
    """Seconds of each round; compiled and warm."""
    spent = []
    for _ in range(rounds + WARM_UP_ROUNDS):
        synchronise(place)
        started_s = time.perf_counter()
        work()
        synchronise(place)
        spent.append(time.perf_counter() - started_s)
    return spent[WARM_UP_ROUNDS:]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, nearest-rank 99th percentile, both ends, and how many."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "least": ordered[0],
        "most": ordered[-1],
        "count": len(ordered),
    }


def rate(moved_bytes: int, spent_s: Sequence[float]) -> dict[str, float]:
    """Bandwidth at the median time."""
    found = spread(spent_s)
    return {
        "gb_s": moved_bytes / found["p50"] / 1e9,
        **{f"{k}_s": found[k] for k in ("p50", "most")},
    }

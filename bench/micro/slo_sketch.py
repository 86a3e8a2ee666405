"""How long an insert into a latency sketch takes.

    python -m bench.micro.slo_sketch [--out FILE]

Prints one JSON object. Times are nanoseconds of wall time a value on one core, the loop and the
call included: of the fastest and of the median of many repeats. Another process on the core shows
in the median first.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from slo import RELATIVE_ERROR, Sketch, SlidingSketch, percentile

VALUES = 20_000
REPEATS = 40
SECONDS = random.Random(7)  # noqa: S311 # a fixed set of latencies, not a secret


def timed_ns(work: Callable[[], object], per: int) -> dict[str, float]:
    """Wall nanoseconds of `work` over `per` values."""
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter_ns()
        work()
        taken.append((time.perf_counter_ns() - started) / per)
    return {"best_ns": round(min(taken), 1), "median_ns": round(median(taken), 1)}


def each(insert: Callable[[float], object], values: list[float]) -> Callable[[], None]:
    """A loop that hands every value to `insert`."""

    def loop() -> None:
        for value in values:
            insert(value)

    return loop


def at_times(sliding: SlidingSketch, values: list[float]) -> Callable[[], None]:
    """A loop over a clock that moves a millisecond a value."""
    started_s = iter(range(10**9))

    def loop() -> None:
        insert, now_s = sliding.insert, float(next(started_s)) * len(values) * 1e-3
        for value in values:
            now_s += 1e-3
            insert(value, now_s)

    return loop


def measure() -> dict[str, object]:
    """All figures of this run."""
    values = [SECONDS.lognormvariate(-3.0, 1.5) for _ in range(VALUES)]
    sketch, bulk, sliding = Sketch(), Sketch(), SlidingSketch()
    figures: dict[str, object] = {
        "insert": timed_ns(each(sketch.insert, values), VALUES),
        "sliding_insert": timed_ns(at_times(sliding, values), VALUES),
        "insert_all": timed_ns(lambda: bulk.insert_all(values), VALUES),
        "loop_and_empty_call": timed_ns(each(lambda value: None, values), VALUES),
        "merge": timed_ns(lambda: bulk.merge(sketch), 1),
        "quantile": timed_ns(lambda: sketch.quantile(0.99), 1),
    }
    off = max(
        abs((sketch.quantile(q) or 0.0) / percentile(values, q) - 1)
        for q in (0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
    )
    figures["relative_error"] = {"bound": RELATIVE_ERROR, "largest_seen": off}
    figures["bytes"] = {
        "memory": sys.getsizeof(sketch.counts) + sum(map(sys.getsizeof, set(sketch.counts))),
        "serialised": len(sketch.to_bytes()),
    }
    figures["machine"] = {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
    }
    return figures


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write there instead of to the screen")
    out = parser.parse_args().out
    text = json.dumps(measure(), indent=2) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

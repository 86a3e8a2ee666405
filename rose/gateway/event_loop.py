"""Health of the gateway's event loop: garbage collection in small steps, and a measure of its lag.

Anything that blocks the loop blocks every token of every stream, and nothing else shows it.
`LoopLag` is a task that measures how late it is woken.

The collector needs a quarter of a microsecond or more for an object, and a live stream is some two
hundred of them. The collector's own thresholds scan the young generation once it has *grown* by a
number: where turns end as fast as they begin it does not grow, and holds all live turns when it is
finally scanned, 40 ms at 2,000 streams. So the clock decides: new objects are scanned every NEW_S,
a millisecond or two, and do not count as new again.

A turn leaves no cycles behind, however it ends; its objects go by their reference counts. Old
objects are scanned for unexpected cycles every OLD_S, while they are few. Many old objects are live
turns, or cycles after all: those may grow to TOO_MANY before a long pause.

The heap of the start is frozen: never scanned.
"""

import asyncio
import gc
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

NEW_S = 0.05
# Number of new objects that starts a scan before NEW_S is over, in a burst.
NEW = 10_000
# Counting many old objects costs 10 ms and more.
OLD_S = 30.0
# Old objects that one collection may scan, besides the garbage that it finds: some 20 ms.
LITTLE = 50_000
# Number of old objects, some 200 MB, above which a pause of half a second is accepted.
TOO_MANY = 2_000_000
# The collector's own schedule for old objects is never used.
NEVER = 2**31 - 1


async def collect_in_small_steps(old_s: float = OLD_S) -> None:
    """Run the garbage collector on new objects every NEW_S seconds until cancelled; then restore
    its settings.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW, NEVER, NEVER)
    try:
        while True:
            for _ in range(max(1, round(old_s / NEW_S))):
                await asyncio.sleep(min(NEW_S, old_s))
                gc.collect(0)
            look_through_old()
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


def look_through_old() -> None:
    """Run a full collection if old objects are few (at most LITTLE), or more than live turns can be
    (above TOO_MANY).
    """
    old = sum(len(gc.get_objects(generation)) for generation in (1, 2))
    if old <= LITTLE or old > TOO_MANY:
        gc.collect()


TICK_S = 0.01
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# The maxima cover this many past seconds.
WINDOW_S = 10
METRIC = "rose_gateway_loop_lag_seconds"
HELP = "How late the event loop woke."


class _Second(NamedTuple):
    """Largest lags measured within one second: `at` is that second of the clock, `busy_s` the part
    in which the loop's thread ran.
    """

    at: int
    lag_s: float
    busy_s: float


class LoopLag:
    """Meter of an event loop's lag, which is how late its timers fire; run `watch` in a task of
    that loop.

    clock: monotonic seconds. worked: seconds of processor time of the loop's thread.
    """

    __slots__ = ("_clock", "_counts", "_seconds", "_sum_s", "_worked")

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._worked = worked
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._seconds: deque[_Second] = deque()

    @property
    def max_s(self) -> float:
        """Largest lag of the last `WINDOW_S` seconds, in seconds."""
        return max((second.lag_s for second in self._recent()), default=0.0)

    @property
    def busy_max_s(self) -> float:
        """Largest part of a lag of the last `WINDOW_S` seconds in which the loop's own thread had
        the processor, in seconds.

        Much less than `max_s` means that other processes kept the loop from running, or that it
        waited in a blocking call.
        """
        return max((second.busy_s for second in self._recent()), default=0.0)

    async def watch(self) -> None:
        """Measure the lag every TICK_S seconds, until cancelled."""
        while True:
            due_s, worked_s = self._clock() + TICK_S, self._worked()
            await asyncio.sleep(TICK_S)
            lag_s = max(0.0, self._clock() - due_s)
            self.note(lag_s, min(lag_s, self._worked() - worked_s))

    def note(self, lag_s: float, busy_s: float) -> None:
        """Record a timer that fired `lag_s` seconds late; the loop's thread ran for `busy_s` of
        them.
        """
        self._counts[bisect_left(BOUNDS_S, lag_s)] += 1
        self._sum_s += lag_s
        now = int(self._clock())
        if self._seconds and self._seconds[-1].at == now:
            last = self._seconds.pop()
            lag_s, busy_s = max(lag_s, last.lag_s), max(busy_s, last.busy_s)
        self._seconds.append(_Second(now, lag_s, busy_s))
        while self._seconds[0].at < now - WINDOW_S:
            self._seconds.popleft()

    def exposition(self) -> Sequence[str]:
        """Return the histogram of all lags since the start, as lines of Prometheus' text."""
        lines, below = [f"# HELP {METRIC} {HELP}", f"# TYPE {METRIC} histogram"], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._counts, strict=True):
            below += count
            lines.append(f'{METRIC}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{METRIC}_sum {self._sum_s:.6f}", f"{METRIC}_count {below}"]

    def _recent(self) -> list[_Second]:
        oldest = int(self._clock()) - WINDOW_S
        return [second for second in self._seconds if second.at >= oldest]

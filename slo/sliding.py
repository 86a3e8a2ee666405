"""Latencies of the last minutes: a sketch for each slice of time."""

import math
from math import log2

from slo.sketch import MAX_S, MIN_S, Sketch, outer_index
from slo.slices import SliceRing


class SlidingSketch:
    """Window quantiles over a ring of `slices` sketches of `slice_s` seconds each.

    At most 50 KB a slice. The clock is handed in; slices older than the ring are dropped.
    """

    def __init__(self, slice_s: float = 10.0, slices: int = 30) -> None:
        self._ring: SliceRing[Sketch] = SliceRing(slice_s, slices, Sketch)
        self._counts = [0]
        self._from_s = self._until_s = math.inf

    @property
    def span_s(self) -> float:
        """The longest window."""
        return self._ring.span_s

    def insert(self, value_s: float, now_s: float) -> bool:
        """Count a latency at `now_s`; False if that slice was dropped already.

        Raises SketchError unless `value_s` is finite and not negative.
        """
        # The sketch's own insert, written out: a second call would cost as much as the count.
        if self._from_s <= now_s < self._until_s and MIN_S <= value_s < MAX_S:
            self._counts[int(log2(value_s) * 36.0 + 721.0)] += 1
            return True
        return self._insert_slowly(value_s, now_s)

    def window(self, now_s: float, window_s: float | None = None) -> Sketch:
        """One sketch of the last `window_s` seconds, the whole ring without one."""
        merged = Sketch()
        for sketch in self._ring.window(now_s, window_s):
            merged.merge(sketch)
        return merged

    def quantile(
        self, fraction: float, now_s: float, window_s: float | None = None
    ) -> float | None:
        """Quantile of that window; None when nothing happened in it."""
        return self.window(now_s, window_s).quantile(fraction)

    def count(self, now_s: float, window_s: float | None = None) -> int:
        """Values in that window."""
        return sum(sketch.count for sketch in self._ring.window(now_s, window_s))

    def _insert_slowly(self, value_s: float, now_s: float) -> bool:
        if not MIN_S <= value_s < MAX_S:
            outer_index(value_s)  # refuses what is no latency before a slice is made for it
        sketch = self._ring.at(now_s)
        if sketch is None:
            return False
        sketch.insert(value_s)
        epoch = self._ring.epoch(now_s)
        self._counts = sketch.counts
        self._from_s = epoch * self._ring.slice_s
        self._until_s = (epoch + 1) * self._ring.slice_s
        return True

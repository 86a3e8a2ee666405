"""Latency sketches: quantiles of bounded relative error, and quantiles of the last minutes.

`Sketch` is a histogram whose buckets are equally wide in log2: 36 to each doubling, from about a
microsecond to four and a half hours (the idea of DDSketch, Masson et al., VLDB 2019, with a fixed
range instead of collapsing buckets). The counts are the whole state, so sketches merge by addition;
count, sum and quantiles are computed when asked for.

`TimeBuckets` is a ring of time slices in bounded memory, and `SlidingSketch` keeps one sketch for
each slice. The clock is handed in.
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from math import log2
from operator import add, mul
from typing import Final, Generic, Self, TypeVar

from slo.errors import SketchError
from slo.histogram import Histogram, nearest_rank

T = TypeVar("T")


class TimeBuckets(Generic[T]):
    """The last `slices` spans of `slice_s` seconds, each with a T of its own made by `make`.

    A slice that fell out of the ring is replaced when its place is needed. Slices ahead of the
    asked time are ignored: a clock that went back sees nothing of its former future.
    Raises ValueError unless both sizes are positive.
    """

    def __init__(self, slice_s: float, slices: int, make: Callable[[], T]) -> None:
        if not (math.isfinite(slice_s) and slice_s > 0 and slices > 0):
            raise ValueError(f"ring of {slices} slices of {slice_s} s; both must be positive")
        self.slice_s = slice_s
        self.span_s = slice_s * slices
        self._make = make
        self._places: list[tuple[int, T] | None] = [None] * slices

    def epoch(self, now_s: float) -> int:
        """Number of the slice that `now_s` lies in."""
        return math.floor(now_s / self.slice_s)

    def at(self, now_s: float) -> T | None:
        """The slice of `now_s`, made if need be; None if its place holds a later one."""
        epoch = self.epoch(now_s)
        place = epoch % len(self._places)
        held = self._places[place]
        if held is not None and held[0] >= epoch:
            return held[1] if held[0] == epoch else None
        made = self._make()
        self._places[place] = (epoch, made)
        return made

    def window(self, now_s: float, window_s: float | None = None) -> list[T]:
        """Slices of the last `window_s` seconds (all without one), the running slice among them.

        Whole slices: up to one slice of time less than asked for. Raises ValueError for a window
        that the ring cannot hold.
        """
        window_s = self.span_s if window_s is None else window_s
        if not 0 < window_s <= self.span_s:
            raise ValueError(f"window of {window_s} s; the ring holds up to {self.span_s} s")
        last = self.epoch(now_s)
        first = last - math.ceil(window_s / self.slice_s - 1e-9)
        return [held[1] for held in self._places if held is not None and first < held[0] <= last]


BUCKETS_PER_DOUBLING: Final = 36
MIN_S: Final = 2.0**-20
MAX_S: Final = 2.0**14
# Bucket 0 holds what is below MIN_S, the last one what is not below MAX_S.
INDEX_OF_ONE_SECOND: Final = 20 * BUCKETS_PER_DOUBLING + 1
BUCKETS: Final = 34 * BUCKETS_PER_DOUBLING + 2
_GROWTH: Final[float] = 2.0 ** (1 / BUCKETS_PER_DOUBLING)
RELATIVE_ERROR: Final = (_GROWTH - 1) / (_GROWTH + 1)
"""Bound on |estimate − value| ÷ value between MIN_S and MAX_S: 0.963%."""


def _typical_s(index: int) -> float:
    if index == 0:
        return MIN_S
    if index == BUCKETS - 1:
        return MAX_S
    # The harmonic mean of both edges is equally far, relatively, from either.
    lower_s: float = 2.0 ** ((index - INDEX_OF_ONE_SECOND) / BUCKETS_PER_DOUBLING)
    return lower_s * (2 * _GROWTH / (1 + _GROWTH))


TYPICAL_S: Final = tuple(map(_typical_s, range(BUCKETS)))
_HEADER: Final = struct.Struct("<4sHHI")
_ENTRY: Final = struct.Struct("<HQ")
_MAGIC: Final = b"RSKT"
_LAYOUT: Final = 1


class Sketch:
    """Counts of latencies in seconds. At most 50 KB, however many values it took.

    Estimates lie within RELATIVE_ERROR of the value; outside MIN_S..MAX_S they are those limits.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        # A list: interpreted code increments it faster than an array, for four times the memory.
        self.counts = [0] * BUCKETS

    def insert(self, value_s: float) -> None:
        """Count one latency; raises SketchError unless it is finite and not negative."""
        if MIN_S <= value_s < MAX_S:
            self.counts[int(log2(value_s) * 36.0 + 721.0)] += 1
        else:
            self.counts[outer_index(value_s)] += 1

    def insert_all(self, values_s: Iterable[float]) -> None:
        """Count many; raises as `insert` does, having counted those before the wrong one."""
        counts = self.counts
        for value_s in values_s:
            if MIN_S <= value_s < MAX_S:
                counts[int(log2(value_s) * 36.0 + 721.0)] += 1
            else:
                counts[outer_index(value_s)] += 1

    def merge(self, other: "Sketch") -> None:
        """Count everything that `other` counted, too."""
        self.counts[:] = map(add, self.counts, other.counts)

    @property
    def count(self) -> int:
        """Values taken."""
        return sum(self.counts)

    @property
    def sum_s(self) -> float:
        """Sum of the values, within RELATIVE_ERROR."""
        return float(sum(map(mul, self.counts, TYPICAL_S)))

    def quantile(self, fraction: float) -> float | None:
        """Nearest-rank quantile within RELATIVE_ERROR, None without values.

        Raises ValueError for a fraction outside (0, 1].
        """
        rank = nearest_rank(fraction, self.count)
        for index, count in enumerate(self.counts):
            rank -= count
            if count and rank <= 0:
                return TYPICAL_S[index]
        return None

    def histogram(self, bounds_s: Sequence[float]) -> Histogram:
        """Cumulative counts at `bounds_s`; a value this close to a bound may fall either side."""
        counts, index, total = [], 0, 0
        for bound_s in bounds_s:
            while index < BUCKETS and TYPICAL_S[index] <= bound_s:
                total += self.counts[index]
                index += 1
            counts.append(total)
        return Histogram(tuple(bounds_s), (*counts, self.count), self.sum_s)

    def to_bytes(self) -> bytes:
        """Little-endian: magic, layout, buckets, entries, then index and count of each entry."""
        held = [(index, count) for index, count in enumerate(self.counts) if count]
        head = _HEADER.pack(_MAGIC, _LAYOUT, BUCKETS, len(held))
        return head + b"".join(_ENTRY.pack(*entry) for entry in held)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of `to_bytes`; raises SketchError for anything else."""
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise SketchError(f"{len(data)} bytes are no sketch; send what to_bytes returned")
        _, layout, buckets, entries = _HEADER.unpack_from(data)
        if (layout, buckets) != (_LAYOUT, BUCKETS):
            raise SketchError(
                f"sketch of layout {layout} with {buckets} buckets, this is layout {_LAYOUT} with "
                f"{BUCKETS}; run the same ROSE version on both sides"
            )
        if len(data) != _HEADER.size + entries * _ENTRY.size:
            raise SketchError(f"sketch of {entries} entries has {len(data)} bytes; send it again")
        sketch, previous = cls(), -1
        for index, count in _ENTRY.iter_unpack(data[_HEADER.size :]):
            if not previous < index < BUCKETS or count == 0:
                raise SketchError(f"sketch entry {index}: {count} is out of order; send it again")
            sketch.counts[index], previous = count, index
        return sketch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sketch) and self.counts == other.counts

    __hash__ = None  # type: ignore[assignment] # it changes with every insert


def outer_index(value_s: float) -> int:
    """Bucket of a value outside MIN_S..MAX_S; raises SketchError if it is no latency at all."""
    if not 0 <= value_s < math.inf:
        raise SketchError(f"latency is {value_s}; give seconds that are finite and not negative")
    return 0 if value_s < MIN_S else BUCKETS - 1


class SlidingSketch:
    """Window quantiles over a ring of `slices` sketches of `slice_s` seconds each.

    At most 50 KB a slice. The clock is handed in; slices older than the ring are dropped.
    """

    def __init__(self, slice_s: float = 10.0, slices: int = 30) -> None:
        self._ring: TimeBuckets[Sketch] = TimeBuckets(slice_s, slices, Sketch)
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

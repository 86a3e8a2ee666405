"""A histogram of latencies with a bounded relative error, as small as it is mergeable.

Buckets are equally wide in log2 (the idea of DDSketch, Masson et al., VLDB 2019, with a fixed range
instead of collapsing buckets): 36 to each doubling, from about a microsecond to four and a half
hours. The counts are the whole state: count, sum and quantiles are worked out when asked for.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from math import log2
from operator import add, mul
from typing import Final, Self

from slo.errors import SketchError
from slo.histogram import Histogram
from slo.percentile import nearest_rank

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

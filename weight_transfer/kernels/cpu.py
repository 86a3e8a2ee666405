"""The processor of weights in host memory: numba's loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels import changes, classes, mixing
from weight_transfer.kernels.difference import CLASSES, Bytes, Difference, Marks
from weight_transfer.kernels.overwrite import Overwrite, Written, check_places
from weight_transfer.kernels.processor import Processor

if TYPE_CHECKING:
    from weight_transfer.tensors import Bits, WeightClass

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class CpuDifference:
    """Changes as `kernels.changes` finds them."""

    old: Bits
    found: changes.Found

    @property
    def count(self) -> int:
        """Changed weights."""
        return self.found.changes.count

    @property
    def growth(self) -> int:
        """What the digest of the tensor grows by, mod 2^64."""
        return self.found.digest_change

    @property
    def gaps(self) -> NDArray[np.uint32]:
        """Distance of each changed weight to the one before, less one."""
        return self.found.changes.gaps

    @property
    def codes(self) -> Bits:
        """Zigzag coded ulp delta of each."""
        return self.found.changes.codes

    def class_counts(self, kind: WeightClass) -> NDArray[np.int64]:
        """Changed weights of each class, i64[CLASSES]."""
        counts = np.zeros(CLASSES, np.int64)
        classes.class_counts(self.old, self.gaps, kind.shift, kind.mask, counts)
        return counts

    def by_class(
        self, kind: WeightClass, ends: Bytes, present: Bytes, starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], Bits]:
        """Return (rank gaps, codes), sorted by class; `starts` is used up."""
        gaps, codes = np.empty_like(self.gaps), np.empty_like(self.codes)
        classes.by_class(
            self.old,
            self.gaps,
            self.codes,
            kind.shift,
            kind.mask,
            ends,
            present,
            starts,
            gaps,
            codes,
        )
        return gaps, codes


@dataclass(frozen=True, slots=True)
class CpuOverwrite:
    """Absolute values for places in host memory."""

    target: Bits
    places: NDArray[np.int64]
    values: Bits
    indices: NDArray[np.int64]

    def run(self) -> Written:
        """Overwrite and read back; running it again is harmless."""
        lost = int(mixing.sum_at(self.indices, self.target[self.places]))
        mixing.scatter(self.target, self.places, self.values)
        found = self.target[self.places]
        gained = int(mixing.sum_at(self.indices, found))
        return Written(lost, gained, int(np.count_nonzero(found != self.values)))


class CpuProcessor:
    """See `Processor`."""

    def compare(self, old: Bits, new: Bits, room: int, first: int) -> Difference | None:
        """Compare two ranges that begin at index `first`; None when over `room` weights changed."""
        found = changes.find_changes(old, new, room, first)
        return None if found is None else CpuDifference(old, found)

    def mark(self, old: Bits, new: Bits, first: int) -> Marks:
        """Compare two ranges however much changed."""
        bitmap, codes = changes.mark_changes(old, new)
        growth = (self.digest(new, first) - self.digest(old, first)) % _MODULUS
        return Marks(bitmap, codes, growth)

    def read(self, bits: Bits) -> Bits:
        """The range itself."""
        return bits

    def digest(self, bits: Bits, first: int) -> int:
        """What a range that begins at index `first` adds to the digest of its tensor."""
        return int(mixing.sum_all(bits, first))

    def expand(
        self, old: Bits, gaps: NDArray[np.uint32], codes: Bits
    ) -> tuple[NDArray[np.int64], Bits]:
        """Return (flat indices, new values). Raises ValueError for changes that are none of old."""
        return changes.apply_changes(old, changes.Changes(gaps, codes))

    def prepare(
        self, target: Bits, places: NDArray[np.int64], values: Bits, indices: NDArray[np.int64]
    ) -> Overwrite:
        """Check an overwrite. Raises IndexError for a place outside."""
        check_places(places, target.size)
        return CpuOverwrite(target, places, values, indices)


CPU: Processor[Bits] = CpuProcessor()

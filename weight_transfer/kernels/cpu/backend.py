"""Kernel backend for weights in host memory: numba's loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weight_transfer.kernels.backend import (
    CLASSES,
    Bytes,
    Change,
    Difference,
    Exchange,
    Int64s,
    Marks,
    Processor,
    check_indices,
)
from weight_transfer.kernels.cpu import changes, range_coder
from weight_transfer.kernels.cpu import digest as mixing
from weight_transfer.kernels.cpu.changes import Deltas, exchange

if TYPE_CHECKING:
    from weight_transfer.format.tensors import Bits, WeightClass

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class CpuDifference(Deltas):
    """Changes of one range of `old`."""

    old: Bits

    def class_counts(self, kind: WeightClass) -> NDArray[np.int64]:
        counts = np.zeros(CLASSES, np.int64)
        range_coder.class_counts(self.old, self.gaps, kind.shift, kind.mask, counts)
        return counts

    def by_class(
        self, kind: WeightClass, ends: Bytes, present: Bytes, starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], Bits]:
        """Return (rank gaps, codes), sorted by class; `starts` is used up."""
        gaps, codes = np.empty_like(self.gaps), np.empty_like(self.codes)
        range_coder.by_class(
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
class CpuExchange:
    """Changes of host memory: they are there already."""

    changes: tuple[tuple[Bits, Change], ...]

    def run(self, *, back: bool = False) -> Int64s:
        """Write all new values, or all old ones `back`; see `Exchange`."""
        counts = np.zeros((len(self.changes), 2), np.int64)
        for row, (target, change) in enumerate(self.changes):
            old, new = (change.new, change.old) if back else (change.old, change.new)
            # Unsigned indices spare the kernel the check whether they count from the end.
            at = change.indices.view(np.uint64)
            counts[row] = np.array(exchange(target, at, old, new)) != 0
        return counts


class CpuProcessor:
    """Kernel backend of host memory; see `Processor`."""

    def compare(self, old: Bits, new: Bits, room: int, first: int) -> Difference | None:
        deltas = changes.find_changes(old, new, room, first)
        if deltas is None:
            return None
        return CpuDifference(deltas.gaps, deltas.codes, deltas.growth, old)

    def mark(self, old: Bits, new: Bits, first: int) -> Marks:
        bitmap, codes = changes.mark_changes(old, new)
        growth = (self.digest(new, first) - self.digest(old, first)) % _MODULUS
        return Marks(bitmap, codes, growth)

    def read(self, bits: Bits) -> Bits:
        return bits

    def digest(self, bits: Bits, first: int) -> int:
        return int(mixing.sum_all(bits, first))

    def stage(self, changes: Sequence[tuple[Bits, Change]], resident_bytes: int) -> Exchange:
        """Check changes. Raises IndexError for an index outside."""
        del resident_bytes
        check_indices(changes)
        return CpuExchange(tuple(changes))


CPU: Processor[Bits] = CpuProcessor()

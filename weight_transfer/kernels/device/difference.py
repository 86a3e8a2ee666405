"""The changes of a range on a device, found by Triton's loops and sorted by torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from weight_transfer.kernels.device import changes
from weight_transfer.kernels.device.bits import DeviceBits, to_device, to_host
from weight_transfer.kernels.device.marking import Marked
from weight_transfer.kernels.device.ranking import ranks_by_slot, slots_of
from weight_transfer.kernels.device.sums import total
from weight_transfer.kernels.difference import CLASSES

if TYPE_CHECKING:
    from weight_transfer.kernels.difference import Bytes
    from weight_transfer.tensors import Bits, WeightClass

_LIST_TILE = 1024


@dataclass(frozen=True, slots=True)
class Described:
    """Changes on the device: `indices` i64, `gaps` i32 (of u32's bits), `codes`, all [n]."""

    indices: torch.Tensor
    gaps: torch.Tensor
    codes: torch.Tensor
    growth: int


@dataclass(frozen=True)
class DeviceDifference:
    """Changes on the device; they come to the host when asked for, once."""

    old: DeviceBits
    marked: Marked
    described: Described

    @property
    def count(self) -> int:
        """Changed weights."""
        return self.marked.count

    @property
    def growth(self) -> int:
        """What the digest of the tensor grows by, mod 2^64."""
        return self.described.growth

    @functools.cached_property
    def gaps(self) -> NDArray[np.uint32]:
        """Distance of each changed weight to the one before, less one."""
        return to_host(self.described.gaps).view(np.uint32)

    @functools.cached_property
    def codes(self) -> Bits:
        """Zigzag coded ulp delta of each."""
        return to_host(self.described.codes)

    def class_counts(self, kind: WeightClass) -> NDArray[np.int64]:
        """Changed weights of each class, i64[CLASSES]."""
        counts: NDArray[np.int64] = (
            torch.bincount(self._classes(kind), minlength=CLASSES).cpu().numpy()
        )
        return counts

    def by_class(
        self, kind: WeightClass, ends: Bytes, present: Bytes, starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint32], Bits]:
        """Return (rank gaps, codes), sorted by class."""
        slots = slots_of(ends, present)
        with torch.cuda.device_of(self.old.flat):  # type: ignore[no-untyped-call]
            where = to_device(slots, self.old.flat)
            ranks = ranks_by_slot(self.old, self.marked.bitmap, kind, where, int(slots.max()) + 1)
            keys, order = torch.sort(where[self._classes(kind)], stable=True)
            ranks = ranks[self.described.indices[order]].to(torch.int64)
            gaps = ranks.clone()
            # The first change of a class follows none.
            gaps[1:] -= torch.where(keys[1:] == keys[:-1], ranks[:-1] + 1, 0)
            codes = self.described.codes[order]
            return to_host(gaps.to(torch.int32)).view(np.uint32), to_host(codes)

    def _classes(self, kind: WeightClass) -> torch.Tensor:
        """Class of each changed weight, i64[count]."""
        return (self.old.flat[self.described.indices].to(torch.int64) >> kind.shift) & kind.mask


def describe(old: DeviceBits, new: DeviceBits, found: Marked, first: int) -> Described:
    """List what `found` marks; the range's first weight has index `first`."""
    indices = found.indices()
    programs = -(-found.count // _LIST_TILE)
    gaps = torch.empty(found.count, dtype=torch.int32, device=indices.device)
    codes = torch.empty(found.count, dtype=old.flat.dtype, device=indices.device)
    sums = torch.empty(programs, dtype=torch.int64, device=indices.device)
    if programs:
        changes.describe[(programs,)](
            old.flat, new.flat, indices, gaps, codes, sums, found.count, first,
            width_bits=8 * old.itemsize, tile_size=_LIST_TILE,
        )  # fmt: skip
    return Described(indices, gaps, codes, total(sums))

"""Kernel backend on a device: Triton's loops over all weights, then torch over the changed ones.

Triton marks which weights of a range changed, a bit for each, and counts them by tile. Their
indices, codes, ranks by class and digest sums follow from the marks.

Everything is launched on the device's current stream and waits only where a number or the changes
come to the host. Temporary memory: an eighth of a byte for each weight and 8 for each changed one;
classes of the `compact` encoding add 4 for each weight of the chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from weight_transfer.kernels.backend import (
    CLASSES,
    Change,
    Difference,
    Exchange,
    Marks,
    Processor,
)
from weight_transfer.kernels.triton import kernels
from weight_transfer.kernels.triton.device_bits import DeviceBits, to_device, to_host
from weight_transfer.kernels.triton.exchange import stage

if TYPE_CHECKING:
    from weight_transfer.format.tensors import Bits, WeightClass
    from weight_transfer.kernels.backend import Bytes
    from weight_transfer.kernels.triton.device_bits import DeviceBits


_BLOCK, _TILE = 4096, 128
# A histogram has a slot for each thread of a warp at least.
_LEAST_SLOTS = 32


def slots_of(ends: Bytes, present: Bytes) -> NDArray[np.int32]:
    """Return the slot that counts each of CLASSES: its place in `present`, or one behind all.

    `ends`, `present`: see `Difference.by_class`.
    """
    lowest, first, last, highest = (int(end) for end in ends)
    joined = np.arange(CLASSES)
    joined[lowest:first] = first
    joined[last + 1 : highest + 1] = last
    slots = np.full(CLASSES, present.size, np.int32)
    slots[present] = np.arange(present.size)
    found: NDArray[np.int32] = slots[joined]
    return found


def ranks_by_slot(
    old: DeviceBits, bitmap: torch.Tensor, kind: WeightClass, slots: torch.Tensor, used: int
) -> torch.Tensor:
    """Return the rank within its slot of each weight that `bitmap` marks, i32; else anything.

    `slots` i32[CLASSES], of which the first `used` are in use.
    """
    slot_count = max(_LEAST_SLOTS, 1 << (used - 1).bit_length())
    blocks = -(-old.size // _BLOCK)
    device = old.flat.device
    # A slot's counts lie side by side: the sum over blocks is as parallel as there are blocks.
    counts = torch.empty((slot_count, blocks), dtype=torch.int32, device=device)
    ranks = torch.empty(old.size, dtype=torch.int32, device=device)
    shape = {"block_size": _BLOCK, "slot_count": slot_count}
    kernels.count_classes[(blocks,)](
        old.flat, slots, counts, old.size, kind.shift, kind.mask, **shape
    )
    before = torch.cumsum(counts, 1, dtype=torch.int32) - counts
    kernels.rank_changed[(blocks,)](
        old.flat, slots, bitmap, before, ranks, old.size, kind.shift, kind.mask,
        **shape, tile_size=_TILE,
    )  # fmt: skip
    return ranks


_MOST_TILE, _TILE_BYTES = 4096, 8192


@dataclass(frozen=True, slots=True)
class Marked:
    """A bit for each weight, in whole tiles; `starts` i64[tiles]: marked in the tiles before."""

    bitmap: torch.Tensor
    starts: torch.Tensor
    count: int
    tile_size: int

    def indices(self) -> torch.Tensor:
        """Marked indices, ascending, i64[count]."""
        indices = torch.empty(self.count, dtype=torch.int64, device=self.bitmap.device)
        if self.count:
            kernels.list_marked[(self.starts.numel(),)](
                self.bitmap, self.starts, indices, tile_size=self.tile_size
            )
        return indices


def mark(old: DeviceBits, new: DeviceBits) -> Marked:
    """Compare two ranges of one size and width."""
    tile_size = min(_MOST_TILE, _TILE_BYTES // old.itemsize)
    tiles = -(-old.size // tile_size)
    device = old.flat.device
    bitmap = torch.empty(tiles * tile_size // 8, dtype=torch.uint8, device=device)
    counts = torch.empty(tiles, dtype=torch.int32, device=device)
    if tiles:
        kernels.mark[(tiles,)](old.flat, new.flat, bitmap, counts, old.size, tile_size=tile_size)
    ends = torch.cumsum(counts, 0)
    count = int(ends[-1]) if tiles else 0
    return Marked(bitmap, ends - counts, count, tile_size)


_TILE, _TILES = 1024, 8


def total(sums: torch.Tensor) -> int:
    """Sum of i64, mod 2^64: torch's own wraps."""
    return int(sums.sum()) % (1 << 64)


def sum_all(bits: DeviceBits, first: int) -> int:
    """Digest's sum over a flat range whose first weight has index `first`."""
    programs = -(-bits.size // (_TILE * _TILES))
    if not programs:
        return 0
    sums = torch.empty(programs, dtype=torch.int64, device=bits.flat.device)
    shape = {"width_bits": 8 * bits.itemsize, "tile_size": _TILE, "tiles": _TILES}
    with torch.cuda.device_of(bits.flat):  # type: ignore[no-untyped-call]
        kernels.sum_tiles[(programs,)](bits.flat, sums, bits.size, first, **shape)
    return total(sums)


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
        return self.marked.count

    @property
    def growth(self) -> int:
        return self.described.growth

    @functools.cached_property
    def gaps(self) -> NDArray[np.uint32]:
        return to_host(self.described.gaps).view(np.uint32)

    @functools.cached_property
    def codes(self) -> Bits:
        return to_host(self.described.codes)

    def class_counts(self, kind: WeightClass) -> NDArray[np.int64]:
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


def describe(old: DeviceBits, new: DeviceBits, marks: Marked, first: int) -> Described:
    """List what `found` marks; the range's first weight has index `first`."""
    indices = marks.indices()
    programs = -(-marks.count // _LIST_TILE)
    gaps = torch.empty(marks.count, dtype=torch.int32, device=indices.device)
    codes = torch.empty(marks.count, dtype=old.flat.dtype, device=indices.device)
    sums = torch.empty(programs, dtype=torch.int64, device=indices.device)
    if programs:
        kernels.describe[(programs,)](
            old.flat, new.flat, indices, gaps, codes, sums, marks.count, first,
            width_bits=8 * old.itemsize, tile_size=_LIST_TILE,
        )  # fmt: skip
    return Described(indices, gaps, codes, total(sums))


class DeviceProcessor:
    """Kernel backend of a device; see `Processor`."""

    def compare(self, old: DeviceBits, new: DeviceBits, room: int, first: int) -> Difference | None:
        with torch.cuda.device_of(old.flat):  # type: ignore[no-untyped-call]
            marks = mark(old, new)
            if marks.count > room:
                return None
            return DeviceDifference(old, marks, describe(old, new, marks, first))

    def mark(self, old: DeviceBits, new: DeviceBits, first: int) -> Marks:
        with torch.cuda.device_of(old.flat):  # type: ignore[no-untyped-call]
            marks = mark(old, new)
            described = describe(old, new, marks, first)
            bitmap = to_host(marks.bitmap)[: (old.size + 7) // 8]
            return Marks(bitmap, to_host(described.codes), described.growth)

    def read(self, bits: DeviceBits) -> Bits:
        return to_host(bits.flat)

    def digest(self, bits: DeviceBits, first: int) -> int:
        return sum_all(bits, first)

    def stage(self, changes: Sequence[tuple[DeviceBits, Change]], resident_bytes: int) -> Exchange:
        """Bring changes to the device, beside what it computes; see `Processor`."""
        return stage(changes, resident_bytes)


DEVICE: Processor[DeviceBits] = DeviceProcessor()

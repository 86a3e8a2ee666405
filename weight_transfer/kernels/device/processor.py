"""The processor of weights on a device: Triton's loops, then torch for what they found.

Everything is launched on the device's current stream and waits only where a number or the changes
come to the host. Temporary memory: an eighth of a byte for each weight and 8 for each changed one;
classes of `compact` add 4 for each weight of the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from weight_transfer.kernels.device import changes
from weight_transfer.kernels.device.bits import DeviceBits, to_device, to_host
from weight_transfer.kernels.device.difference import DeviceDifference, describe
from weight_transfer.kernels.device.exchange import stage
from weight_transfer.kernels.device.marking import mark
from weight_transfer.kernels.device.sums import sum_all
from weight_transfer.kernels.difference import Difference, Marks
from weight_transfer.kernels.exchange import Change, Exchange
from weight_transfer.kernels.processor import Processor

if TYPE_CHECKING:
    from weight_transfer.tensors import Bits

_LIST_TILE = 1024


class DeviceProcessor:
    """See `Processor`."""

    def compare(self, old: DeviceBits, new: DeviceBits, room: int, first: int) -> Difference | None:
        """Compare two ranges that begin at index `first`; None when over `room` weights changed."""
        with torch.cuda.device_of(old.flat):  # type: ignore[no-untyped-call]
            found = mark(old, new)
            if found.count > room:
                return None
            return DeviceDifference(old, found, describe(old, new, found, first))

    def mark(self, old: DeviceBits, new: DeviceBits, first: int) -> Marks:
        """Compare two ranges however much changed."""
        with torch.cuda.device_of(old.flat):  # type: ignore[no-untyped-call]
            found = mark(old, new)
            described = describe(old, new, found, first)
            bitmap = to_host(found.bitmap)[: (old.size + 7) // 8]
            return Marks(bitmap, to_host(described.codes), described.growth)

    def read(self, bits: DeviceBits) -> Bits:
        """A copy of the range."""
        return to_host(bits.flat)

    def digest(self, bits: DeviceBits, first: int) -> int:
        """What a range that begins at index `first` adds to the digest of its tensor."""
        return sum_all(bits, first)

    def expand(
        self, old: DeviceBits, gaps: NDArray[np.uint32], codes: Bits
    ) -> tuple[NDArray[np.int64], Bits]:
        """Return (flat indices, new values). Raises ValueError for changes that are none of old."""
        with torch.cuda.device_of(old.flat):  # type: ignore[no-untyped-call]
            steps = to_device(gaps.astype(np.int64), old.flat) + 1
            indices, changed_by = torch.cumsum(steps, 0) - 1, to_device(codes, old.flat)
            if codes.size and int(indices[-1]) >= old.size:
                raise ValueError("a changed index lies outside the chunk's rows")
            if bool((changed_by == 0).any()):
                raise ValueError("a change of nothing is listed")
            values = torch.empty_like(changed_by)
            if codes.size:
                changes.change[(-(-codes.size // _LIST_TILE),)](
                    old.flat, indices, changed_by, values, codes.size,
                    width_bits=8 * old.itemsize, tile_size=_LIST_TILE,
                )  # fmt: skip
            return to_host(indices).view(np.int64), to_host(values)

    def stage(self, changes: Sequence[Change[DeviceBits]], resident_bytes: int) -> Exchange:
        """Bring changes to the device, beside what it computes; see `Processor`."""
        return stage(changes, resident_bytes)


DEVICE: Processor[DeviceBits] = DeviceProcessor()

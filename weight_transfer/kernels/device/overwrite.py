"""What overwrites live weights on a device, uploaded beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weight_transfer.kernels.device import overwriting
from weight_transfer.kernels.device.bits import DeviceBits
from weight_transfer.kernels.device.sums import total
from weight_transfer.kernels.overwrite import Written

_TILE = 1024


@dataclass(frozen=True, slots=True)
class DeviceOverwrite:
    """`places`, `indices` i64[n] and `values`[n], uploaded: under a pause nothing is copied."""

    target: DeviceBits
    places: torch.Tensor
    values: torch.Tensor
    indices: torch.Tensor

    def run(self) -> Written:
        """Overwrite and read back; running it again is harmless."""
        count = self.places.numel()
        if not count:
            return Written(0, 0, 0)
        grid = (-(-count // _TILE),)
        lost, gained, wrong = torch.empty((3, *grid), dtype=torch.int64, device=self.places.device)
        shape = {"width_bits": 8 * self.target.itemsize, "tile_size": _TILE}
        changes = (self.target.flat, self.places, self.values, self.indices)
        with torch.cuda.device_of(self.target.flat):  # type: ignore[no-untyped-call]
            overwriting.overwrite[grid](*changes, lost, count, **shape)
            overwriting.read_back[grid](*changes, gained, wrong, count, **shape)
        return Written(total(lost), total(gained), total(wrong))

"""Sums of digests on a device."""

from __future__ import annotations

import torch

from weight_transfer.kernels.device import mixing
from weight_transfer.kernels.device.bits import DeviceBits

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
        mixing.sum_tiles[(programs,)](bits.flat, sums, bits.size, first, **shape)
    return total(sums)

"""Which weights of a range changed: a bit for each, and where each tile's are listed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weight_transfer.kernels.device import changes
from weight_transfer.kernels.device.bits import DeviceBits

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
            changes.list_marked[(self.starts.numel(),)](
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
        changes.mark[(tiles,)](old.flat, new.flat, bitmap, counts, old.size, tile_size=tile_size)
    ends = torch.cumsum(counts, 0)
    count = int(ends[-1]) if tiles else 0
    return Marked(bitmap, ends - counts, count, tile_size)

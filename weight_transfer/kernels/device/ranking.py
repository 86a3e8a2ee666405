"""Where a weight is counted, and how many are counted there before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from weight_transfer.kernels.device import classes
from weight_transfer.kernels.difference import CLASSES

if TYPE_CHECKING:
    from weight_transfer.kernels.device.bits import DeviceBits
    from weight_transfer.kernels.difference import Bytes
    from weight_transfer.tensors import WeightClass

_BLOCK, _TILE = 4096, 128
# A histogram has a slot for each thread of a warp at least.
_LEAST_SLOTS = 32


def slots_of(ends: Bytes, present: Bytes) -> NDArray[np.int32]:
    """Where each of CLASSES is counted: at its place in `present`, or behind all of them.

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
    """How many weights of its slot come before each one that `bitmap` marks, i32; else anything.

    `slots` i32[CLASSES], of which the first `used` are in use.
    """
    slot_count = max(_LEAST_SLOTS, 1 << (used - 1).bit_length())
    blocks = -(-old.size // _BLOCK)
    device = old.flat.device
    # A slot's counts lie side by side: the sum over blocks is as parallel as there are blocks.
    counts = torch.empty((slot_count, blocks), dtype=torch.int32, device=device)
    ranks = torch.empty(old.size, dtype=torch.int32, device=device)
    shape = {"block_size": _BLOCK, "slot_count": slot_count}
    classes.count_classes[(blocks,)](
        old.flat, slots, counts, old.size, kind.shift, kind.mask, **shape
    )
    before = torch.cumsum(counts, 1, dtype=torch.int32) - counts
    classes.rank_changed[(blocks,)](
        old.flat, slots, bitmap, before, ranks, old.size, kind.shift, kind.mask,
        **shape, tile_size=_TILE,
    )  # fmt: skip
    return ranks

"""Triton: the rank of each changed weight among those of its class, see `kernels.classes`.

A range is cut in blocks. The first pass counts each block's classes; their sums over the blocks
before it are the ranks with which the second begins. In a block each tile of a few weights is
compared with itself, whose time is the same whatever changed and however classes lie.
Only a few classes hold changes: `slots` says where each is counted, all others together.
"""

from __future__ import annotations

import triton.language as tl

from weight_transfer.kernels.device.changes import marked
from weight_transfer.kernels.device.jit import launched


@launched
def slot_of(
    old: tl.tensor,
    slots: tl.tensor,
    index: tl.tensor,
    inside: tl.tensor,
    shift: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """Where the class of the weight at `index` is counted, as i32; that of class 0 outside."""
    bits = tl.load(old + index, mask=inside, other=0).to(tl.int64)
    return tl.load(slots + ((bits >> shift) & mask))


@launched
def count_classes(
    old: tl.tensor,
    slots: tl.tensor,
    counts: tl.tensor,
    size: tl.tensor,
    shift: tl.tensor,
    mask: tl.tensor,
    block_size: tl.constexpr,
    slot_count: tl.constexpr,
) -> None:
    """Fill `counts` i32[slot_count, blocks].

    What lies outside is counted with class 0: only behind the last weight, so no rank sees it.
    """
    block = tl.program_id(0).to(tl.int64)
    index = block * block_size + tl.arange(0, block_size)
    found = tl.histogram(slot_of(old, slots, index, index < size, shift, mask), slot_count)
    tl.store(counts + tl.arange(0, slot_count) * tl.num_programs(0) + block, found)


@launched
def rank_changed(
    old: tl.tensor,
    slots: tl.tensor,
    bitmap: tl.tensor,
    before: tl.tensor,
    ranks: tl.tensor,
    size: tl.tensor,
    shift: tl.tensor,
    mask: tl.tensor,
    block_size: tl.constexpr,
    slot_count: tl.constexpr,
    tile_size: tl.constexpr,
) -> None:
    """Write `ranks` i32[size] where `bitmap` marks; the rest is left as it is.

    `before` i32[slot_count, blocks]: weights of each slot in the blocks before.
    """
    block = tl.program_id(0).to(tl.int64)
    seen = tl.load(before + tl.arange(0, slot_count) * tl.num_programs(0) + block)
    at = tl.arange(0, tile_size)
    earlier = at[None, :] < at[:, None]
    tiles = tl.cdiv(tl.minimum(size - block * block_size, block_size), tile_size)
    for tile in range(tiles):
        index = block * block_size + tile * tile_size + at
        inside = index < size
        slot = slot_of(old, slots, index, inside, shift, mask)
        equal = (slot[None, :] == slot[:, None]) & earlier
        rank = tl.gather(seen, slot, 0) + tl.sum(equal.to(tl.int32), 1)
        changed = inside & (marked(bitmap, tl.where(inside, index, 0)) != 0)
        tl.store(ranks + index, rank, mask=changed)
        seen += tl.histogram(slot, slot_count)

"""Triton: which weights changed, and by how much.

mark      every weight, once: a bit for each and how many there are in each tile
list      the bits: a tile's changed indices go behind those of the tiles before it
describe  changed weights alone: gap, code, and what the digest grows by
Codes are made in a pass of their own because nearly all lanes of the first would compute nothing.
"""

from __future__ import annotations

import triton.language as tl

from weight_transfer.kernels.device.jit import launched
from weight_transfer.kernels.device.mixing import finalise, gamma_times, widened


@launched
def mark(
    old: tl.tensor,
    new: tl.tensor,
    bitmap: tl.tensor,
    counts: tl.tensor,
    size: tl.tensor,
    tile_size: tl.constexpr,
) -> None:
    """Fill `bitmap` (whole tiles, least significant bit first) and `counts`, one for each tile."""
    tile = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, tile_size // 8)
    lane = tl.arange(0, 8)
    index = tile * tile_size + byte[:, None] * 8 + lane[None, :]
    inside = index < size
    before = tl.load(old + index, mask=inside, other=0)
    after = tl.load(new + index, mask=inside, other=0)
    changed = (before != after).to(tl.int32)
    tl.store(
        bitmap + tile * (tile_size // 8) + byte, tl.sum(changed << lane[None, :], 1).to(tl.uint8)
    )
    tl.store(counts + tile, tl.sum(tl.sum(changed, 1), 0))


@launched
def list_marked(
    bitmap: tl.tensor,
    starts: tl.tensor,
    indices: tl.tensor,
    tile_size: tl.constexpr,
) -> None:
    """Write the marked indices of a tile from `starts[tile]` on."""
    tile = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, tile_size // 8)
    lane = tl.arange(0, 8)
    bits = tl.load(bitmap + tile * (tile_size // 8) + byte).to(tl.int32)
    changed = (bits[:, None] >> lane[None, :]) & 1
    found = tl.sum(changed, 1)
    before = tl.load(starts + tile) + tl.cumsum(found, 0) - found
    to = before[:, None] + tl.cumsum(changed, 1) - changed
    index = tile * tile_size + byte[:, None] * 8 + lane[None, :]
    tl.store(indices + to, index, mask=changed != 0)


@launched
def marked(bitmap: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The bit at `index`, as i32."""
    return (tl.load(bitmap + index // 8).to(tl.int32) >> (index % 8).to(tl.int32)) & 1


@launched
def describe(
    old: tl.tensor,
    new: tl.tensor,
    indices: tl.tensor,
    gaps: tl.tensor,
    codes: tl.tensor,
    sums: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    width_bits: tl.constexpr,
    tile_size: tl.constexpr,
) -> None:
    """Gaps, codes and sums of growth; the range's first weight has index `first`."""
    program = tl.program_id(0).to(tl.int64)
    at = program * tile_size + tl.arange(0, tile_size)
    inside = at < count
    index = tl.load(indices + at, mask=inside, other=0)
    previous = tl.load(indices + at - 1, mask=inside & (at > 0), other=-1)
    before = widened(tl.load(old + index, mask=inside, other=0), width_bits)
    after = widened(tl.load(new + index, mask=inside, other=0), width_bits)
    delta = widened((after - before).to(tl.int64, bitcast=True), width_bits)
    # Zigzag: the sign goes to the lowest bit. What lies beyond the width is cut when it is stored.
    sign = 0 - (delta >> (width_bits - 1))
    code = (delta << 1) ^ sign
    tl.store(gaps + at, (index - previous - 1).to(tl.int32), mask=inside)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside)
    start = gamma_times((first + index).to(tl.uint64))
    grown = tl.where(inside, finalise(start + after) - finalise(start + before), 0)
    tl.store(sums + program, tl.sum(grown, 0).to(tl.int64, bitcast=True))


@launched
def change(
    old: tl.tensor,
    indices: tl.tensor,
    codes: tl.tensor,
    values: tl.tensor,
    count: tl.tensor,
    width_bits: tl.constexpr,
    tile_size: tl.constexpr,
) -> None:
    """The way back: `values` are the weights of `old` at `indices`, changed by `codes`."""
    at = tl.program_id(0).to(tl.int64) * tile_size + tl.arange(0, tile_size)
    inside = at < count
    index = tl.load(indices + at, mask=inside, other=0)
    code = widened(tl.load(codes + at, mask=inside, other=0), width_bits)
    before = widened(tl.load(old + index, mask=inside, other=0), width_bits)
    after = before + ((code >> 1) ^ (0 - (code & 1)))
    tl.store(values + at, after.to(values.dtype.element_ty), mask=inside)

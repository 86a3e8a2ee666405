"""Triton: the position-mixed sum of `weight_transfer.digest`, all of it in integers mod 2^64.

Each program leaves its own sum; adding them is left to torch, whose int64 wraps too. Addition mod
2^64 has no order, so the result depends on no schedule.
"""

from __future__ import annotations

import triton.language as tl

from weight_transfer.kernels.device.jit import launched


@launched
def widened(values: tl.tensor, width_bits: tl.constexpr) -> tl.tensor:
    """The bits of signed integers as u64."""
    wide = values.to(tl.int64).to(tl.uint64, bitcast=True)
    return wide if width_bits == 64 else wide & ((1 << width_bits) - 1)


@launched
def gamma_times(index: tl.tensor) -> tl.tensor:
    """(index + 1)·γ of u64."""
    return (index + 1) * 0x9E3779B97F4A7C15


@launched
def finalise(mixed: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser."""
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@launched
def sum_tiles(
    bits: tl.tensor,
    sums: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    width_bits: tl.constexpr,
    tile_size: tl.constexpr,
    tiles: tl.constexpr,
) -> None:
    """Sum of tiles tiles a program; the first weight of `bits` has index `first`.

    (index + 1)·γ is a tile's own part plus a lane's, which is multiplied once for all tiles: 64-bit
    products are what this kernel waits for.
    """
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, tile_size)
    spread = lane.to(tl.uint64) * 0x9E3779B97F4A7C15
    total = tl.zeros([tile_size], tl.uint64)
    for tile in range(tiles):
        start = (program * tiles + tile) * tile_size
        inside = start + lane < size
        value = widened(tl.load(bits + start + lane, mask=inside, other=0), width_bits)
        mixed = finalise(gamma_times((first + start).to(tl.uint64)) + spread + value)
        total += tl.where(inside, mixed, 0)
    tl.store(sums + program, tl.sum(total, 0).to(tl.int64, bitcast=True))

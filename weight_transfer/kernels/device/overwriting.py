"""Triton: overwriting weights where they changed, and reading them back."""

from __future__ import annotations

import triton.language as tl

from weight_transfer.kernels.device.jit import launched
from weight_transfer.kernels.device.mixing import finalise, gamma_times, widened


@launched
def overwrite(
    target: tl.tensor,
    places: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    sums: tl.tensor,
    count: tl.tensor,
    width_bits: tl.constexpr,
    tile_size: tl.constexpr,
) -> None:
    """Write `values` to `target` at distinct `places`; `sums`: of what was there at `indices`."""
    program = tl.program_id(0).to(tl.int64)
    at = program * tile_size + tl.arange(0, tile_size)
    inside = at < count
    place = tl.load(places + at, mask=inside, other=0)
    before = widened(tl.load(target + place, mask=inside, other=0), width_bits)
    tl.store(target + place, tl.load(values + at, mask=inside, other=0), mask=inside)
    start = gamma_times(tl.load(indices + at, mask=inside, other=0).to(tl.uint64))
    lost = tl.where(inside, finalise(start + before), 0)
    tl.store(sums + program, tl.sum(lost, 0).to(tl.int64, bitcast=True))


@launched
def read_back(
    target: tl.tensor,
    places: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    sums: tl.tensor,
    wrong: tl.tensor,
    count: tl.tensor,
    width_bits: tl.constexpr,
    tile_size: tl.constexpr,
) -> None:
    """`sums` of what is there, and how many weights are not `values`."""
    program = tl.program_id(0).to(tl.int64)
    at = program * tile_size + tl.arange(0, tile_size)
    inside = at < count
    place = tl.load(places + at, mask=inside, other=0)
    found = tl.load(target + place, mask=inside, other=0)
    differs = found != tl.load(values + at, mask=inside, other=0)
    start = gamma_times(tl.load(indices + at, mask=inside, other=0).to(tl.uint64))
    gained = tl.where(inside, finalise(start + widened(found, width_bits)), 0)
    tl.store(sums + program, tl.sum(gained, 0).to(tl.int64, bitcast=True))
    tl.store(wrong + program, tl.sum(differs.to(tl.int64), 0))

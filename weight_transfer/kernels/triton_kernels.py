"""Triton kernels on weights as bits: digest sums, comparison, ranks by class, exchange.

A kernel's parameters are annotated as `tl.tensor`, pointers to a tensor's first weight too: Triton
looks annotations up.

Digest. The position-mixed sum of `weight_transfer.format.digest` is integer arithmetic mod 2^64.
Each program leaves its own sum, and torch adds them: its int64 wraps too. Addition mod 2^64 has no
order, so the result depends on no schedule.

Comparison, in three passes:

mark      every weight, once: a bit for each and how many there are in each tile
list      the bits: a tile's changed indices go behind those of the tiles before it
describe  changed weights alone: gap, code, and the digest's growth

Codes are made in a pass of their own because nearly all lanes of the first would compute nothing.

Ranks. The rank of a changed weight among those of its class, see `kernels.range_coder`. A
range is cut in blocks. The first pass counts each block's classes; their sums over the blocks
before it are the ranks with which the second begins. In a block each tile of a few weights is
compared with itself, which takes the same time whatever changed and however classes lie.
Only a few classes hold changes: `slots` says where each is counted, all others together.

Exchange. Weights are overwritten where they changed, and read back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# A variant for each alignment would be compiled under an engine's pause.
_ANY = ("target", "count")


def launched(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:  # noqa: ANN401
    """Return `kernel` as Triton device code.

    It is compiled anew for each combination of argument types and alignments, except arguments that
    the option `do_not_specialize` names. `kernel[grid](...)` launches it; another kernel calls it.
    """
    return triton.jit(kernel, **options)


@launched
def widened(values: tl.tensor, width_bits: tl.constexpr) -> tl.tensor:
    """Return the bits of signed integers of `width_bits` as u64."""
    wide = values.to(tl.int64).to(tl.uint64, bitcast=True)
    return wide if width_bits == 64 else wide & ((1 << width_bits) - 1)


@launched
def gamma_times(index: tl.tensor) -> tl.tensor:
    """Return (index + 1)·γ of u64, γ being SplitMix64's constant."""
    return (index + 1) * 0x9E3779B97F4A7C15


@launched
def finalise(mixed: tl.tensor) -> tl.tensor:
    """Return SplitMix64's finaliser of u64."""
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
    """Store the digest's sum over `tiles` tiles of weights in `sums`, one sum for each program.

    The first weight of `bits` has index `first`. (index + 1)·γ is a tile's own part plus a lane's,
    which is multiplied once for all tiles: 64-bit products are what this kernel waits for.
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


@launched
def mark(
    old: tl.tensor,
    new: tl.tensor,
    bitmap: tl.tensor,
    counts: tl.tensor,
    size: tl.tensor,
    tile_size: tl.constexpr,
) -> None:
    """Store a bit for each weight that differs in `bitmap`, and their number by tile in `counts`.

    `bitmap`: whole tiles, least significant bit first.
    """
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
    """Store the indices of a tile's marked weights in `indices`, from position `starts[tile]`
    on."""
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
    """Return the bit of `bitmap` at `index`, as i32."""
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
    """Store gap and code of each changed weight, and the digest's growth for each program in
    `sums`.

    `indices`: the changed weights. The range's first weight has index `first`.
    """
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
def slot_of(
    old: tl.tensor,
    slots: tl.tensor,
    index: tl.tensor,
    inside: tl.tensor,
    shift: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """Return the slot of the class of the weight at `index`, i32.

    That of class 0 where not `inside`.
    """
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
    """Store the number of weights by slot and block in `counts` i32[slot_count, blocks].

    Lanes behind the last weight are counted as class 0, which no rank depends on.
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
    """Store in `ranks` i32[size], for each marked weight, how many of its slot come before it.

    Other elements of `ranks` are left as they are. `before` i32[slot_count, blocks]: weights of
    each slot in the blocks before.
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


@launched(do_not_specialize=_ANY)
def exchange(
    target: tl.tensor,
    places: tl.tensor,
    old: tl.tensor,
    new: tl.tensor,
    odd: tl.tensor,
    count: tl.tensor,
    tile_size: tl.constexpr,
) -> None:
    """Write `new` to `target` at distinct `places`; add to odd[0] the number that was not `old`."""
    at = tl.program_id(0).to(tl.int64) * tile_size + tl.arange(0, tile_size)
    inside = at < count
    place = tl.load(places + at, mask=inside, other=0).to(tl.int64)
    found = tl.load(target + place, mask=inside, other=0)
    differs = found != tl.load(old + at, mask=inside, other=0)
    tl.store(target + place, tl.load(new + at, mask=inside, other=0), mask=inside)
    stale = tl.sum((differs & inside).to(tl.int64), 0)
    tl.atomic_add(odd, stale, mask=stale != 0)


@launched(do_not_specialize=_ANY)
def read_back(
    target: tl.tensor,
    places: tl.tensor,
    new: tl.tensor,
    odd: tl.tensor,
    count: tl.tensor,
    tile_size: tl.constexpr,
) -> None:
    """Add to odd[1] the number of weights at `places` of `target` that do not read as `new`."""
    at = tl.program_id(0).to(tl.int64) * tile_size + tl.arange(0, tile_size)
    inside = at < count
    place = tl.load(places + at, mask=inside, other=0).to(tl.int64)
    found = tl.load(target + place, mask=inside, other=0)
    differs = found != tl.load(new + at, mask=inside, other=0)
    wrong = tl.sum((differs & inside).to(tl.int64), 0)
    tl.atomic_add(odd + 1, wrong, mask=wrong != 0)

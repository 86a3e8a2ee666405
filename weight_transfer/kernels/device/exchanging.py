"""Triton: weights are overwritten where they changed, and read back."""

from __future__ import annotations

import triton.language as tl

from weight_transfer.kernels.device.jit import launched

# A variant for each alignment would be compiled under an engine's pause.
_ANY = ("target", "count")


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
    """Write `new` to `target` at distinct `places`; odd[0] grows by what was not `old`."""
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
    """odd[1] grows by the weights that do not read as `new`."""
    at = tl.program_id(0).to(tl.int64) * tile_size + tl.arange(0, tile_size)
    inside = at < count
    place = tl.load(places + at, mask=inside, other=0).to(tl.int64)
    found = tl.load(target + place, mask=inside, other=0)
    differs = found != tl.load(new + at, mask=inside, other=0)
    wrong = tl.sum((differs & inside).to(tl.int64), 0)
    tl.atomic_add(odd + 1, wrong, mask=wrong != 0)

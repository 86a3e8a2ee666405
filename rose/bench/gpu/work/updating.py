"""Piece `update`: a sparse update of a whole model written over live weights.

What is timed is what happens under an engine's pause but for the pause itself and the probe.
"""

import time
from collections.abc import Iterator
from math import prod
from typing import Any

from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.models import shape_of
from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.work.bare import allow_kernels_alone
from rose.bench.gpu.work.cuda import told
from rose.bench.gpu.work.timing import WARM_UP_ROUNDS, spread, synchronise

_LOWEST_BIT = 1


def run(sizes: Sizes, place: str) -> dict[str, Any]:
    """Stage an update and the way back, then write them in turns; each is read back."""
    import torch

    torch.manual_seed(0)
    live = {
        name: torch.empty(prod(shape), dtype=torch.bfloat16, device=place).normal_(0, 0.02)
        for name, shape in shape_of(sizes.model).tensors().items()
    }
    started_s = time.perf_counter()
    there, back = _staged(live, sizes.density)
    synchronise(place)
    staged_s = time.perf_counter() - started_s
    spent_s = []
    for number in range(sizes.rounds + WARM_UP_ROUNDS):
        synchronise(place)
        started_s = time.perf_counter()
        wrong = [write.run().wrong for write in (there, back)[number % 2]]
        synchronise(place)
        spent_s.append(time.perf_counter() - started_s)
        _insist_written((there, back)[number % 2], sum(wrong))
    changed = sum(write.places.numel() for write in there)
    return {
        "model": sizes.model,
        "tensors": len(live),
        "weights": sum(tensor.numel() for tensor in live.values()),
        "changed": changed,
        "staged_s": staged_s,
        "overwrite_s": spread(spent_s[WARM_UP_ROUNDS:]),
        **told(place),
    }


def _staged(live: dict[str, Any], density: float) -> tuple[list[Any], list[Any]]:
    """Overwrites that flip the lowest bit of some weights of each tensor, and that flip it back."""
    pairs = list(_pairs(live, density))
    return [there for there, _ in pairs], [back for _, back in pairs]


def _pairs(live: dict[str, Any], density: float) -> Iterator[tuple[Any, Any]]:
    import torch

    allow_kernels_alone()
    from weight_transfer.kernels.device.bits import DeviceBits, to_host
    from weight_transfer.kernels.device.processor import DEVICE

    for tensor in live.values():
        bits = DeviceBits(tensor.view(torch.int16))
        where = (torch.rand(bits.size, device=tensor.device) < density).nonzero().view(-1)
        places, before = where.cpu().numpy(), bits.flat[where]
        values = [to_host(before ^ _LOWEST_BIT), to_host(before)]
        there, back = (DEVICE.prepare(bits, places, value, places) for value in values)
        yield there, back


def _insist_written(writes: list[Any], wrong: int) -> None:
    """Look again with torch, outside of what is timed."""
    for write in writes:
        wrong += int((write.target.flat[write.places] != write.values).sum())
    if wrong:
        raise PieceError(f"{wrong} weights do not read as they were written")

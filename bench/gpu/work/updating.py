"""Piece `update`: a sparse update of a whole model written over live weights.

The time is that under an engine's pause but for the pause itself and the probe.
"""

import time
from collections.abc import Iterator
from math import prod
from typing import Any

from bench.gpu.models import shape_of
from bench.gpu.pieces import PieceError
from bench.gpu.sizes import Sizes
from bench.gpu.work.timing import (
    WARM_UP_ROUNDS,
    allow_kernels_alone,
    spread,
    synchronise,
    told,
)

RESIDENT_BYTES = 2 << 30
_LOWEST_BIT = 1


def run(sizes: Sizes, place: str) -> dict[str, Any]:
    """Stage an update, then write it and the way back in turns; each is read back."""
    import torch

    torch.manual_seed(0)
    live = {
        name: torch.empty(prod(shape), dtype=torch.bfloat16, device=place).normal_(0, 0.02)
        for name, shape in shape_of(sizes.model).tensors().items()
    }
    changes = list(_changes(live, sizes.density))
    started_s = time.perf_counter()
    exchange = _staged(changes)
    synchronise(place)
    staged_s = time.perf_counter() - started_s
    spent_s = []
    for number in range(sizes.rounds + WARM_UP_ROUNDS):
        back = bool(number % 2)
        synchronise(place)
        started_s = time.perf_counter()
        odd = exchange.run(back=back)
        synchronise(place)
        spent_s.append(time.perf_counter() - started_s)
        _insist_written(changes, int(odd.sum()), back=back)
    return {
        "model": sizes.model,
        "tensors": len(live),
        "weights": sum(tensor.numel() for tensor in live.values()),
        "changed": sum(change.indices.size for _, change in changes),
        "staged_s": staged_s,
        "staged_bytes": exchange.device_bytes,
        "streamed_pieces": len(exchange.streamed),
        "overwrite_s": spread(spent_s[WARM_UP_ROUNDS:]),
        **told(place),
    }


def _changes(live: dict[str, Any], density: float) -> Iterator[Any]:
    """Yield changes that flip the lowest bit of some weights of each tensor."""
    import torch

    allow_kernels_alone()
    from weight_transfer.format.tensors import DeviceBits, to_host
    from weight_transfer.kernels.processor import Change

    for tensor in live.values():
        bits = DeviceBits(tensor.view(torch.int16))
        where = (torch.rand(bits.size, device=tensor.device) < density).nonzero().view(-1)
        before = bits.flat[where]
        after = to_host(before ^ _LOWEST_BIT)
        yield bits, Change(where.cpu().numpy(), to_host(before), after)


def _staged(changes: list[Any]) -> Any:  # noqa: ANN401 -- a type of the package under test
    from weight_transfer.kernels.device import stage

    return stage(changes, RESIDENT_BYTES)


def _insist_written(changes: list[Any], odd: int, *, back: bool) -> None:
    """Compare the weights with torch, outside of the timed part."""
    import torch

    from weight_transfer.format.tensors import to_device

    for target, change in changes:
        live = target.flat
        wanted = to_device(change.old if back else change.new, live)
        odd += int((live[torch.from_numpy(change.indices).to(live.device)] != wanted).sum())
    if odd:
        raise PieceError(f"{odd} weights do not read as they were written")

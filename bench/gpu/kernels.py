"""Pieces `copy`, `kernels` and `update`: the card's own copies, the weight kernels, an update.

The tests of the piece `tests` prove the kernels bit for bit; here they are timed.
"""

import itertools
import math
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from bench.gpu.machine import ROOT
from bench.gpu.models import shape_of
from bench.gpu.pieces import PieceError, Sizes, absent

WARM_UP_ROUNDS = 2
SMALLEST_BYTES = 64 << 20
CHUNK_BYTES = 64 << 20
RESIDENT_BYTES = 2 << 30
# Shift and bits of a bf16 weight's class.
_CLASS_OF_BF16 = (7, 8)
_NONZERO_WEIGHTS = 1 << 28
_SECTOR_BYTES = 32
NEEDED_BY_THE_PACKAGE = ("blake3", "cryptography", "numba", "zstandard")


def allow_kernels_alone() -> None:
    """Let modules of `weight_transfer` be imported where the package itself cannot be."""
    if absent(NEEDED_BY_THE_PACKAGE) and "weight_transfer" not in sys.modules:
        package = types.ModuleType("weight_transfer")
        package.__path__ = [str(ROOT / "weight_transfer")]
        sys.modules["weight_transfer"] = package


def insist_device(place: str) -> None:
    """Raise PieceError when torch cannot use the device."""
    import torch

    if place.startswith("cuda") and not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"is built for CUDA {built}" if built else "is built without CUDA"
        raise PieceError(
            f"torch {torch.__version__} {why} and sees no GPU; use a Python whose torch does"
        )


def told(place: str) -> dict[str, Any]:
    """Return name, capability and CUDA of a torch device."""
    import torch

    if not place.startswith("cuda"):
        return {"device": {"name": place}}
    properties = torch.cuda.get_device_properties(place)
    return {
        "device": {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "torch_cuda": torch.version.cuda,
            "most_bytes_allocated": torch.cuda.max_memory_allocated(place),
        }
    }


def seconds(work: Callable[[], Any], rounds: int, place: str) -> list[float]:
    """Return the seconds of each round, after rounds that compile and warm up."""
    return [_timed(work, place)[0] for _ in range(rounds + WARM_UP_ROUNDS)][WARM_UP_ROUNDS:]


def _timed(work: Callable[[], Any], place: str) -> tuple[float, Any]:
    """Return the seconds of some work, and its result."""
    _synchronise(place)
    started_s = time.perf_counter()
    found = work()
    _synchronise(place)
    return time.perf_counter() - started_s, found


def _synchronise(place: str) -> None:
    if place.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, nearest-rank 99th percentile, both ends, and the count."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "least": ordered[0],
        "most": ordered[-1],
        "count": len(ordered),
    }


def rate(moved_bytes: int, spent_s: Sequence[float]) -> dict[str, float]:
    """Return the bandwidth at the median time."""
    p50_s = statistics.median(spent_s)
    return {"gb_s": moved_bytes / p50_s / 1e9, "p50_s": p50_s, "most_s": max(spent_s)}


def copy_speeds(sizes: Sizes, place: str) -> dict[str, Any]:
    """Copy within the card (bytes read and written), and to and from pinned host memory."""
    import torch

    def copied(target: torch.Tensor, source: torch.Tensor, moved: int) -> dict[str, float]:
        spent_s = seconds(lambda: target.copy_(source), sizes.rounds, place)
        return {"bytes": source.numel(), **rate(moved, spent_s)}

    rows = []
    for nbytes in (SMALLEST_BYTES, 1 << 30, 4 << 30):
        if nbytes <= max(sizes.tensor_bytes, SMALLEST_BYTES):
            one = torch.ones(nbytes, dtype=torch.uint8, device=place)
            rows.append(copied(torch.empty_like(one), one, 2 * nbytes))
    nbytes = min(sizes.tensor_bytes, 1 << 30)
    on_card = torch.ones(nbytes, dtype=torch.uint8, device=place)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=place.startswith("cuda"))
    return {
        "within_card": rows,
        "to_host": copied(on_host, on_card, nbytes),
        "from_host": copied(on_card, on_host, nbytes),
        **told(place),
    }


@dataclass(frozen=True, slots=True)
class KernelWork:
    """One kernel, and the bytes that it must read and write.

    touched_bytes: bytes that the card moves for them at least, where that is more: whole sectors.
    """

    name: str
    moved_bytes: int
    run: Callable[[], Any]
    touched_bytes: int = 0


def run(sizes: Sizes, place: str) -> dict[str, Any]:
    """Time each kernel on bf16 weights, beside the copy of the same run.

    `share_of_copy` counts the bytes that are asked for, `touched_share_of_copy` whole sectors.
    """
    works = _works(sizes, place)
    found = {
        work.name: rate(work.moved_bytes, seconds(work.run, sizes.rounds, place)) for work in works
    }
    copy = found["copy"]["gb_s"]
    for work in works:
        row = found[work.name]
        row["share_of_copy"] = row["gb_s"] / copy
        if work.touched_bytes:
            row["touched_share_of_copy"] = work.touched_bytes / row["p50_s"] / 1e9 / copy
    return {"speed": found, **told(place)}


def _works(sizes: Sizes, place: str) -> list[KernelWork]:
    import torch

    allow_kernels_alone()
    from weight_transfer.format.tensors import DeviceBits
    from weight_transfer.kernels import device

    size, nbytes = sizes.tensor_bytes // 2, sizes.tensor_bytes
    torch.manual_seed(0)
    weights = torch.empty(size, dtype=torch.bfloat16, device=place).normal_(0, 0.02)
    old = DeviceBits(weights.view(torch.int16))
    new = DeviceBits(old.flat + (torch.rand(size, device=place) < sizes.density))
    other = torch.empty_like(old.flat)

    def encoded() -> None:
        found = device.compare(old, new, old.size, 0)
        _ = found and (found.gaps, found.codes)

    return [
        KernelWork("copy", 2 * nbytes, lambda: other.copy_(old.flat)),
        KernelWork("digest", nbytes, lambda: device.digest(old, 0)),
        KernelWork("diff", 2 * nbytes, lambda: device.compare(old, new, size, 0)),
        KernelWork("encode_to_host", 2 * nbytes, encoded),
        _ranking(old, new),
        _overwriting(old, new),
    ]


def _ranking(old: Any, new: Any) -> KernelWork:  # noqa: ANN401 -- of the package under test
    """Return the ranks of `compact`, which are computed a chunk at a time."""
    from weight_transfer.format.tensors import WeightClass
    from weight_transfer.kernels import device

    chunk = slice(0, min(old.size, CHUNK_BYTES // 2))
    kind = WeightClass(*_CLASS_OF_BF16)
    part = device.compare(old[chunk], new[chunk], chunk.stop, 0)
    if part is None or not part.count:
        raise ValueError("the first chunk has no changes; raise --density")

    def ranks() -> None:
        counts = part.class_counts(kind)
        # The codec asks for (ends, present, starts), with the two smallest classes as one, and so
        # the two largest.
        changed = np.flatnonzero(counts)
        present = changed[1:-1] if changed.size > 2 else changed[:1]
        ends = np.array([changed[0], present[0], present[-1], changed[-1]], np.uint8)
        joined = np.clip(changed, present[0], present[-1])
        sizes = np.bincount(joined, counts[changed], counts.size)[present].astype(np.int64)
        part.by_class(kind, ends, present.astype(np.uint8), np.cumsum(sizes) - sizes)

    return KernelWork("compact_ranks_of_a_chunk", 2 * 2 * chunk.stop, ranks)


def _overwriting(old: Any, new: Any) -> KernelWork:  # noqa: ANN401 -- of the package under test
    import torch

    from weight_transfer.format.tensors import DeviceBits
    from weight_transfer.kernels import device
    from weight_transfer.kernels.processor import Change

    places, values = [], []
    # Torch has counted the elements of a `nonzero` in 32 bits.
    for start in range(0, old.size, _NONZERO_WEIGHTS):
        part = slice(start, start + _NONZERO_WEIGHTS)
        where = (old.flat[part] != new.flat[part]).nonzero().view(-1)
        values.append(device.read(DeviceBits(new.flat[part][where])))
        places.append(where.cpu().numpy() + start)
    at = np.concatenate(places)
    target = DeviceBits(old.flat.clone())
    was = device.read(DeviceBits(old.flat[torch.from_numpy(at).to(old.flat.device)]))
    exchange = device.stage([(target, Change(at, was, np.concatenate(values)))], 1 << 40)
    if exchange.run().any() or not torch.equal(target.flat, new.flat):
        raise PieceError("the overwritten weights are not the new ones")
    if old.flat.is_cuda:
        torch.cuda.empty_cache()
    # Both passes over places and new values, one over old; weights are read twice, written once.
    lists = at.size * (2 * 4 + 3 * 2)
    sectors = np.unique(at * 2 // _SECTOR_BYTES).size * _SECTOR_BYTES
    moved, touched = lists + 3 * 2 * at.size, lists + 3 * sectors
    turns = itertools.cycle((True, False))
    work = lambda: exchange.run(back=next(turns))  # noqa: E731 -- there and back in turns
    return KernelWork("overwrite_and_read_back", moved, work, touched)


def update(sizes: Sizes, place: str) -> dict[str, Any]:
    """Stage an update of a whole model, write it and the way back in turns; each is read back.

    The time is that under an engine's pause but for the pause itself and the probe.
    """
    import torch

    torch.manual_seed(0)
    live = {
        name: torch.empty(prod(shape), dtype=torch.bfloat16, device=place).normal_(0, 0.02)
        for name, shape in shape_of(sizes.model).tensors().items()
    }
    changes = [_flipped(tensor, sizes.density) for tensor in live.values()]
    from weight_transfer.kernels.device import stage

    staged_s, exchange = _timed(partial(stage, changes, RESIDENT_BYTES), place)
    spent_s = []
    for number in range(sizes.rounds + WARM_UP_ROUNDS):
        back = bool(number % 2)
        took_s, odd = _timed(partial(exchange.run, back=back), place)
        spent_s.append(took_s)
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


def _flipped(tensor: Any, density: float) -> tuple[Any, Any]:  # noqa: ANN401 -- torch's
    """Return a tensor's bits, and a change that flips the lowest bit of some of its weights."""
    import torch

    allow_kernels_alone()
    from weight_transfer.format.tensors import DeviceBits, to_host
    from weight_transfer.kernels.processor import Change

    bits = DeviceBits(tensor.view(torch.int16))
    where = (torch.rand(bits.size, device=tensor.device) < density).nonzero().view(-1)
    before = bits.flat[where]
    return bits, Change(where.cpu().numpy(), to_host(before), to_host(before ^ 1))


def _insist_written(changes: list[tuple[Any, Any]], odd: int, *, back: bool) -> None:
    """Compare the weights with torch, outside of the timed part."""
    import torch

    from weight_transfer.format.tensors import to_device

    for target, change in changes:
        live = target.flat
        wanted = to_device(change.old if back else change.new, live)
        odd += int((live[torch.from_numpy(change.indices).to(live.device)] != wanted).sum())
    if odd:
        raise PieceError(f"{odd} weights do not read as they were written")

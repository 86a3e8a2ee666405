"""Pieces `copy` and `kernels`: the card's own copies, and the weight kernels proved, then timed."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.pieces import PieceError
from bench.gpu.sizes import Sizes
from bench.gpu.work.reference import WIDTHS, compare, ends_of
from bench.gpu.work.timing import allow_kernels_alone, rate, seconds, told

SMALLEST_BYTES = 64 << 20


def copy_speeds(sizes: Sizes, place: str) -> dict[str, Any]:
    """Copy within the card (bytes read and written), and to and from pinned host memory."""
    import torch

    rows = []
    for nbytes in (SMALLEST_BYTES, 1 << 30, 4 << 30):
        if nbytes > max(sizes.tensor_bytes, SMALLEST_BYTES):
            continue
        one = torch.ones(nbytes, dtype=torch.uint8, device=place)
        other = torch.empty_like(one)

        def copied(source: torch.Tensor = one, target: torch.Tensor = other) -> None:
            target.copy_(source)

        rows.append({"bytes": nbytes, **rate(2 * nbytes, seconds(copied, sizes.rounds, place))})
    nbytes = min(sizes.tensor_bytes, 1 << 30)
    on_card = torch.ones(nbytes, dtype=torch.uint8, device=place)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=place.startswith("cuda"))
    return {
        "within_card": rows,
        "to_host": {
            "bytes": nbytes,
            **rate(nbytes, seconds(lambda: on_host.copy_(on_card), sizes.rounds, place)),
        },
        "from_host": {
            "bytes": nbytes,
            **rate(nbytes, seconds(lambda: on_card.copy_(on_host), sizes.rounds, place)),
        },
        **told(place),
    }


CHUNK_BYTES = 64 << 20
SPARSE, DENSE = 0.001, 0.6
_CLASS_OF_BF16 = (7, 8)
_NONZERO_WEIGHTS = 1 << 28
_SECTOR_BYTES = 32


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel, and the bytes that it must read and write.

    touched_bytes: bytes that the card moves for them at least, where that is more: whole sectors.
    """

    name: str
    moved_bytes: int
    run: Callable[[], Any]
    touched_bytes: int = 0


def run(sizes: Sizes, place: str) -> dict[str, Any]:
    """Compare in all widths, then time; a difference ends the piece."""
    compared = sum(
        compare(place, width, sizes.check_size, density)
        for width in WIDTHS
        for density in (SPARSE, sizes.density, DENSE)
    )
    return {"comparisons_equal": compared, "speed": speed(sizes, place), **told(place)}


def speed(sizes: Sizes, place: str) -> dict[str, dict[str, float]]:
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
    return found


def _works(sizes: Sizes, place: str) -> list[Work]:
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
    return [
        Work("copy", 2 * nbytes, lambda: other.copy_(old.flat)),
        Work("digest", nbytes, lambda: device.digest(old, 0)),
        Work("diff", 2 * nbytes, lambda: device.compare(old, new, size, 0)),
        Work("encode_to_host", 2 * nbytes, lambda: _encoded(old, new)),
        _ranking(old, new),
        _overwriting(old, new),
    ]


def _encoded(old: Any, new: Any) -> None:  # noqa: ANN401 -- a type of the package under test
    from weight_transfer.kernels import device

    found = device.compare(old, new, old.size, 0)
    _ = found and (found.gaps, found.codes)


def _ranking(old: Any, new: Any) -> Work:  # noqa: ANN401
    """Return the ranks of `compact`, which are computed a chunk at a time."""
    from weight_transfer.format.tensors import WeightClass
    from weight_transfer.kernels import device

    chunk = slice(0, min(old.size, CHUNK_BYTES // 2))
    kind = WeightClass(*_CLASS_OF_BF16)
    part = device.compare(old[chunk], new[chunk], chunk.stop, 0)
    if part is None or not part.count:
        raise ValueError("the first chunk has no changes; raise --density")

    def ranks() -> None:
        part.by_class(kind, *ends_of(part.class_counts(kind)))

    return Work("compact_ranks_of_a_chunk", 2 * 2 * chunk.stop, ranks)


def _overwriting(old: Any, new: Any) -> Work:  # noqa: ANN401
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
    return Work("overwrite_and_read_back", moved, work, touched)

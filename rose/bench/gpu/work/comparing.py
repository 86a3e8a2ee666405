"""Every kernel beside numpy, bit for bit."""

from typing import Any

import numpy as np

from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.work.bare import allow_kernels_alone
from rose.bench.gpu.work.reference import CLASSES, Bits, ends_of, ranked, step_of, summed, zigzag

WIDTHS = (1, 2, 4, 8)
_MODULUS = 1 << 64
# Weights of a large tensor lie behind others.
_FIRST = 1 << 33
Found = dict[str, tuple[Any, Any]]


def compare(place: str, width: int, size: int, density: float) -> int:
    """Compare every kernel with numpy; return how many comparisons were made.

    Raises PieceError for the first that differs.
    """
    old, new = step_of(width, size, density)
    found = _differences(place, old, new) | _overwritten(place, old, new)
    for what, (one, other) in found.items():
        if not np.array_equal(one, other):
            raise PieceError(
                f"{what}, {8 * width} bit, {density:.1%} changed: the device and numpy differ"
            )
    return len(found)


def _held(bits: Bits, place: str) -> Any:  # noqa: ANN401 -- a type of the package under test
    import torch

    from weight_transfer.kernels.triton.device_bits import DeviceBits

    return DeviceBits(torch.from_numpy(bits.view(f"<i{bits.itemsize}").copy()).to(place))


def _growth(old: Bits, new: Bits, changed: Bits) -> int:
    at = changed + _FIRST
    return (summed(at, new[changed]) - summed(at, old[changed])) % _MODULUS


def _differences(place: str, old: Bits, new: Bits) -> Found:
    allow_kernels_alone()
    from weight_transfer.format.tensors import WeightClass
    from weight_transfer.kernels.triton.backend import DEVICE

    changed = np.flatnonzero(old != new)
    before, after = _held(old, place), _held(new, place)
    difference = DEVICE.compare(before, after, old.size, _FIRST)
    if difference is None:
        raise PieceError(f"{8 * old.itemsize} bit: the device finds more changes than weights")
    kind = WeightClass(*CLASSES[old.itemsize])
    wanted = ranked(old, changed)
    rank_gaps, codes = difference.by_class(kind, *ends_of(wanted.counts))
    marks = DEVICE.mark(before, after, _FIRST)
    coded = zigzag(old[changed], new[changed])
    return {
        "digest": (DEVICE.digest(before, _FIRST), summed(np.arange(old.size) + _FIRST, old)),
        "count": (difference.count, changed.size),
        "growth": (difference.growth, _growth(old, new, changed)),
        "gaps": (difference.gaps, np.diff(changed, prepend=-1) - 1),
        "codes": (difference.codes, coded),
        "class counts": (difference.class_counts(kind), wanted.counts),
        "rank gaps": (rank_gaps, wanted.gaps),
        "sorted codes": (codes, coded[wanted.order]),
        "bitmap": (marks.bitmap, np.packbits(old != new, bitorder="little")),
        "too many": (DEVICE.compare(before, after, changed.size - 1, 0) is None, True),
    }


def _overwritten(place: str, old: Bits, new: Bits) -> Found:
    allow_kernels_alone()
    from weight_transfer.kernels.backend import RangeChange
    from weight_transfer.kernels.triton.backend import DEVICE

    changed = np.flatnonzero(old != new)
    live = _held(old, place)
    exchange = DEVICE.stage([RangeChange(live, changed, old[changed], new[changed])], 0)
    return {
        "exchanged": (exchange.run(), [[0, 0]]),
        "read back": (DEVICE.read(live), new),
        "stale": (exchange.run(), [[changed.size, 0]]),
    }

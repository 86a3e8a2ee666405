"""Reference of every kernel in numpy: slow, short, and free of the kernels' own code."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu.pieces import PieceError
from bench.gpu.work.timing import allow_kernels_alone

Bits = NDArray[Any]
CLASS_COUNT = 256
# Shift and bits of a weight's class, by width: sign and exponent, or what there is of them.
CLASSES = {1: (3, 4), 2: (7, 8), 4: (23, 8), 8: (52, 8)}
_GAMMA, _M1, _M2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Changes by class: how many there are of each, their order, and the gaps of their ranks."""

    counts: Bits
    order: Bits
    gaps: Bits


def summed(index: Bits, value: Bits) -> int:
    """Return the sum that these weights add to the digest, mod 2^64."""
    z = (index.astype(np.uint64) + np.uint64(1)) * _GAMMA + value.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))


def zigzag(old: Bits, new: Bits) -> Bits:
    """Return the codes of changes."""
    delta = new - old
    sign = (delta.view(f"<i{old.itemsize}") >> (8 * old.itemsize - 1)).view(delta.dtype)
    coded: Bits = (delta << np.array(1, delta.dtype)) ^ sign
    return coded


def ends_of(counts: Bits) -> tuple[Bits, Bits, Bits]:
    """Return (ends, present, starts) as the codec asks for: the two smallest classes are one.

    So are the two largest.
    """
    changed = np.flatnonzero(counts)
    present = changed[1:-1] if changed.size > 2 else changed[:1]
    ends = np.array([changed[0], present[0], present[-1], changed[-1]], np.uint8)
    joined = np.clip(changed, present[0], present[-1])
    sizes = np.bincount(joined, counts[changed], CLASS_COUNT)[present].astype(np.int64)
    return ends, present.astype(np.uint8), np.cumsum(sizes) - sizes


def ranked(old: Bits, changed: Bits) -> Ranked:
    """Rank the changed indices among the weights of their class."""
    shift, bits = CLASSES[old.itemsize]
    mask = (1 << bits) - 1
    kinds = ((old >> np.array(shift, old.dtype)) & np.array(mask, old.dtype)).astype(np.int64)
    counts = np.bincount(kinds[changed], minlength=CLASS_COUNT)
    lowest, first, last, highest = (int(end) for end in ends_of(counts)[0])
    keys = np.where((lowest <= kinds) & (kinds <= highest), np.clip(kinds, first, last), kinds)
    order = np.argsort(keys, kind="stable")
    starts = np.searchsorted(keys[order], np.arange(CLASS_COUNT))
    ranks = np.empty(old.size, np.int64)
    ranks[order] = np.arange(old.size) - starts[keys[order]]
    by = np.argsort(keys[changed], kind="stable")
    rank, key = ranks[changed][by], keys[changed][by]
    gaps = rank.copy()
    gaps[1:] -= np.where(key[1:] == key[:-1], rank[:-1] + 1, 0)
    return Ranked(counts, by, gaps)


def step_of(width: int, size: int, density: float) -> tuple[Bits, Bits]:
    """Return random old weights and new ones."""
    rng = np.random.default_rng(width)
    old = rng.integers(0, 1 << (8 * width), size, dtype=f"<u{width}")
    new = old.copy()
    moved = rng.random(size) < density
    new[moved] += rng.integers(1, 5, np.count_nonzero(moved), dtype=old.dtype)
    return old, new


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

    from weight_transfer.format.tensors import DeviceBits

    return DeviceBits(torch.from_numpy(bits.view(f"<i{bits.itemsize}").copy()).to(place))


def _growth(old: Bits, new: Bits, changed: Bits) -> int:
    at = changed + _FIRST
    return (summed(at, new[changed]) - summed(at, old[changed])) % _MODULUS


def _differences(place: str, old: Bits, new: Bits) -> Found:
    allow_kernels_alone()
    from weight_transfer.format.tensors import WeightClass
    from weight_transfer.kernels import device

    changed = np.flatnonzero(old != new)
    before, after = _held(old, place), _held(new, place)
    difference = device.compare(before, after, old.size, _FIRST)
    if difference is None:
        raise PieceError(f"{8 * old.itemsize} bit: the device finds more changes than weights")
    kind = WeightClass(*CLASSES[old.itemsize])
    wanted = ranked(old, changed)
    rank_gaps, codes = difference.by_class(kind, *ends_of(wanted.counts))
    marks = device.mark(before, after, _FIRST)
    coded = zigzag(old[changed], new[changed])
    return {
        "digest": (device.digest(before, _FIRST), summed(np.arange(old.size) + _FIRST, old)),
        "count": (difference.count, changed.size),
        "growth": (difference.growth, _growth(old, new, changed)),
        "gaps": (difference.gaps, np.diff(changed, prepend=-1) - 1),
        "codes": (difference.codes, coded),
        "class counts": (difference.class_counts(kind), wanted.counts),
        "rank gaps": (rank_gaps, wanted.gaps),
        "sorted codes": (codes, coded[wanted.order]),
        "bitmap": (marks.bitmap, np.packbits(old != new, bitorder="little")),
        "too many": (device.compare(before, after, changed.size - 1, 0) is None, True),
    }


def _overwritten(place: str, old: Bits, new: Bits) -> Found:
    allow_kernels_alone()
    from weight_transfer.kernels import device
    from weight_transfer.kernels.processor import Change

    changed = np.flatnonzero(old != new)
    live = _held(old, place)
    exchange = device.stage([(live, Change(changed, old[changed], new[changed]))], 0)
    return {
        "exchanged": (exchange.run(), [[0, 0]]),
        "read back": (device.read(live), new),
        "stale": (exchange.run(), [[changed.size, 0]]),
    }
